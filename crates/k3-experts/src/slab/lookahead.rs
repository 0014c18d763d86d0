//! Whether guesses pay.
//!
//! A guess that came true is a read that nobody waits for; one that did not has taken the drive from whatever could have
//! been read instead. What decides is therefore the share of guesses *that were read* which somebody asked for. An
//! expert in a slot is never guessed, so the share is one over misses, which is lower than the router's agreement.

/// Guesses that a verdict rests on.
const WINDOW: u32 = 64;
/// Share that must come true for guesses to go on.
const STAY: f64 = 0.5;
/// Share that must come true after a pause.
const RETURN: f64 = 0.6;
/// Passes of the first pause; each one in a row is twice as long.
const PAUSE: u32 = 4;
/// Passes of the longest.
const LONGEST_PAUSE: u32 = 64;

/// Switches guesses off and on. Knows no time: it counts guesses and passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lookahead {
    /// Passes until guesses are tried again; 0: they are on.
    pause: u32,
    next_pause: u32,
    is_trial: bool,
    useful: u32,
    wasted: u32,
}

impl Default for Lookahead {
    fn default() -> Self {
        Self { pause: 0, next_pause: PAUSE, is_trial: false, useful: 0, wasted: 0 }
    }
}

impl Lookahead {
    pub(super) fn is_on(&self) -> bool {
        self.pause == 0
    }

    /// A pass over the layers has begun.
    pub(super) fn pass(&mut self) {
        self.pause = self.pause.saturating_sub(1);
    }

    /// A guess that was read, or is being read, has been asked for or has expired.
    pub(super) fn judged(&mut self, is_useful: bool) {
        let count = if is_useful { &mut self.useful } else { &mut self.wasted };
        *count += 1;
        let of = self.useful + self.wasted;
        if of < WINDOW || !self.is_on() {
            return;
        }
        let share = f64::from(self.useful) / f64::from(of);
        (self.useful, self.wasted) = (0, 0);
        if share >= if self.is_trial { RETURN } else { STAY } {
            (self.is_trial, self.next_pause) = (false, PAUSE);
        } else {
            self.pause = self.next_pause;
            self.next_pause = (2 * self.next_pause).min(LONGEST_PAUSE);
            self.is_trial = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Judges guesses of which `share` of 100 come true, evenly.
    fn judge(lookahead: &mut Lookahead, share: u32, guesses: u32) {
        for i in 0..guesses {
            lookahead.judged((i + 1) * share / 100 > i * share / 100);
        }
    }

    /// Passes until guesses are on again.
    fn pause(lookahead: &mut Lookahead) -> u32 {
        (0..1000)
            .take_while(|_| {
                let off = !lookahead.is_on();
                lookahead.pass();
                off
            })
            .count() as u32
    }

    #[test]
    fn good_guesses_stay_and_bad_ones_pause_longer_and_longer() {
        let mut lookahead = Lookahead::default();
        judge(&mut lookahead, 55, 1000);
        assert!(lookahead.is_on());
        let mut lookahead = Lookahead::default();
        let mut pauses = Vec::new();
        for _ in 0..7 {
            judge(&mut lookahead, 40, WINDOW - 1);
            assert!(lookahead.is_on(), "no verdict on less than {WINDOW} guesses");
            judge(&mut lookahead, 40, 1);
            assert!(!lookahead.is_on());
            pauses.push(pause(&mut lookahead));
        }
        assert_eq!(pauses, [4, 8, 16, 32, 64, 64, 64]);
    }

    #[test]
    fn a_return_asks_for_more_than_staying() {
        let returns = |share| {
            let mut lookahead = Lookahead::default();
            judge(&mut lookahead, 0, WINDOW);
            pause(&mut lookahead);
            judge(&mut lookahead, share, WINDOW);
            lookahead.is_on()
        };
        assert!(!returns(55));
        assert!(returns(65));
        // Then it is as before the first pause.
        let mut lookahead = Lookahead::default();
        judge(&mut lookahead, 0, WINDOW);
        pause(&mut lookahead);
        judge(&mut lookahead, 70, WINDOW);
        assert_eq!(lookahead, Lookahead::default());
    }
}
