//! How many cores this process may use: the one thing that this crate asks the system.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// One a physical core that this process may use: two threads of a core share its registers and its way to memory, and
/// kernels that are bound by either gain nothing from the second.
pub(super) fn default_threads() -> usize {
    // What affinity and control groups leave.
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let cores = physical_cores(Path::new("/sys/devices/system/cpu"), &status);
    cores.map_or(allowed, |cores| cores.clamp(1, allowed))
}

/// Cores of which the `Cpus_allowed_list` of `status` has a thread, by the topology in `folder`. `None` where there is none.
fn physical_cores(folder: &Path, status: &str) -> Option<usize> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse::<usize>().ok()?..=last.parse::<usize>().ok()? {
            // The threads of a core all give the same list of themselves.
            let siblings = folder.join(format!("cpu{cpu}/topology/thread_siblings_list"));
            cores.insert(fs::read_to_string(siblings).ok()?);
        }
    }
    Some(cores.len())
}

#[cfg(test)]
mod tests {
    use super::physical_cores;

    #[test]
    fn threads_of_a_core_count_once() {
        let folder = std::env::temp_dir().join(format!("k3-topology-{}", std::process::id()));
        for (cpu, siblings) in [(0, "0,4"), (1, "1,5"), (2, "2,6"), (4, "0,4"), (5, "1,5")] {
            let topology = folder.join(format!("cpu{cpu}/topology"));
            std::fs::create_dir_all(&topology).unwrap();
            std::fs::write(topology.join("thread_siblings_list"), format!("{siblings}\n")).unwrap();
        }
        let cores = |list: &str| physical_cores(&folder, &format!("Name:\tk3\nCpus_allowed_list:\t{list}\n"));
        assert_eq!(cores("0-2,4-5"), Some(3));
        assert_eq!(cores("4"), Some(1));
        assert_eq!(cores("0,4"), Some(1));
        // A processor without topology, a list that is none, no list.
        assert_eq!(cores("0-3"), None);
        assert_eq!(cores("all"), None);
        assert_eq!(physical_cores(&folder, "Name:\tk3\n"), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
