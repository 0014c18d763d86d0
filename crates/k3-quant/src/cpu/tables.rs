//! The values of all codes of 4 bits, worked out by the compiler.

use crate::{E2M1, int4_value};

/// Codes.
const CODES: usize = 16;

/// [`E2M1::VALUES`] times a scale.
pub(super) const fn e2m1(scale: f32) -> [f32; CODES] {
    let (mut values, mut code) = (E2M1::VALUES, 0);
    while code < CODES {
        values[code] *= scale;
        code += 1;
    }
    values
}

/// The values of the nibbles of INT4.
pub(super) const INT4: [f32; CODES] = {
    let (mut values, mut nibble) = ([0.0; CODES], 0);
    while nibble < CODES {
        values[nibble] = int4_value(nibble as u8);
        nibble += 1;
    }
    values
};
