//! How much memory there is: what the machine has free, and what limits leave.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Memory as a new process finds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Bytes of the machine.
    pub total: u64,
    /// Bytes that can be taken without swapping; page cache that can be given up counts.
    pub available: u64,
    /// What these bytes are.
    pub source: Bound,
    /// What else bounds this process.
    pub limits: Vec<Limit>,
}

/// A bound on the memory of this process or of a group that it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What sets it.
    pub bound: Bound,
    /// Bytes at most.
    pub bytes: u64,
    /// Bytes in use, without page cache that can be given up.
    pub used: u64,
}

/// What bounds the memory of a process, as messages name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// A size that was given.
    #[default]
    Given,
    /// What the machine has free.
    Available,
    /// A control group.
    ControlGroup {
        /// 1 or 2.
        version: u8,
        /// Its folder.
        place: PathBuf,
    },
    /// `ulimit -d`: pages that no file is behind.
    DataSize,
    /// `ulimit -v`: files that are mapped count as well.
    AddressSpace,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("as given"),
            Self::Available => f.write_str("available on this machine"),
            Self::ControlGroup { version, place } => {
                write!(f, "control group v{version} {}", place.display())
            }
            Self::DataSize => f.write_str("the process limit \"Max data size\""),
            Self::AddressSpace => f.write_str("the process limit \"Max address space\""),
        }
    }
}

impl Machine {
    /// A machine of which all memory is free.
    pub fn with(total: u64) -> Self {
        Self { total, available: total, source: Bound::Given, limits: Vec::new() }
    }

    /// Reads `/proc` and the control groups of both versions.
    ///
    /// # Errors
    /// If `/proc/meminfo` cannot be read or understood: other systems do not have it. What else is missing is no limit.
    pub fn read() -> io::Result<Self> {
        Self::read_under(Path::new("/"))
    }

    /// The same, of files under `root`.
    fn read_under(root: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(root.join("proc/meminfo"))?;
        let unknown = || io::Error::new(io::ErrorKind::InvalidData, "MemTotal or MemAvailable not found");
        let (total, available) = meminfo(&text).ok_or_else(unknown)?;
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let mut limits = Vec::new();
        for group in groups(&read("proc/self/cgroup")) {
            limits.extend(group.limits(root));
        }
        limits.extend(process_limits(&read("proc/self/limits"), &read("proc/self/status")));
        // Groups without a limit state one beyond any machine.
        limits.retain(|limit| limit.bytes < total);
        Ok(Self { total, available, source: Bound::Available, limits })
    }

    /// Bytes that this process can still take, and what bounds them.
    pub fn room(&self) -> (u64, &Bound) {
        let limits = self.limits.iter().map(|limit| (limit.bytes.saturating_sub(limit.used), &limit.bound));
        limits.fold((self.available, &self.source), |least, next| if next.0 < least.0 { next } else { least })
    }
}

/// The most memory that this process has had at once, where the system tells.
pub fn peak_rss() -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The memory that this process has now, where the system tells.
pub fn rss() -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Total and available bytes of `/proc/meminfo`.
fn meminfo(text: &str) -> Option<(u64, u64)> {
    let total = field(text, "MemTotal:")?;
    let available = field(text, "MemAvailable:").or_else(|| {
        // Before Linux 3.14.
        Some(field(text, "MemFree:")?.saturating_add(field(text, "Cached:")? / 2))
    })?;
    Some((total, available.min(total)))
}

/// `Name:   123 kB`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => number.checked_mul(1024),
        None => Some(number),
        Some(_) => None,
    }
}

/// A control group with a say on memory.
#[derive(Debug, PartialEq, Eq)]
struct Group<'a> {
    files: &'static Files,
    path: &'a str,
}

/// Where a version of control groups keeps its figures.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    version: u8,
    mount: &'static str,
    /// The strictest counts: above `memory.high` a group is slowed down until it is of no use.
    limits: &'static [&'static str],
    used: &'static str,
    /// Lines of `memory.stat` that count what the kernel gives up before it kills.
    reclaimable: &'static [&'static str],
}

static V1: Files = Files {
    version: 1,
    mount: "sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file ", "total_active_file "],
};

static V2: Files = Files {
    version: 2,
    mount: "sys/fs/cgroup",
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    reclaimable: &["inactive_file ", "active_file ", "slab_reclaimable "],
};

/// The groups that `/proc/self/cgroup` names.
fn groups(text: &str) -> Vec<Group<'_>> {
    let group = |line: &'_ str| -> Option<(&'static Files, usize)> {
        let (id, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let files = match (id, controllers) {
            ("0", "") => &V2,
            (_, controllers) if controllers.split(',').any(|c| c == "memory") => &V1,
            _ => return None,
        };
        Some((files, path.len()))
    };
    let parse = |line: &'_ str| group(line).map(|(files, len)| (files, line.len() - len));
    text.lines()
        .filter_map(|line| parse(line).map(|(files, at)| Group { files, path: &line[at..] }))
        .collect()
}

impl Group<'_> {
    /// Its limits, and those of the groups around it. In a container the path may be one of the host, of which only
    /// the end of the way up exists.
    fn limits(&self, root: &Path) -> Vec<Limit> {
        let mount = root.join(self.files.mount);
        let inside: PathBuf = Path::new(self.path).components().skip(1).collect();
        let places = inside.ancestors().map(|place| mount.join(place));
        places.filter_map(|place| self.limit(&place)).collect()
    }

    fn limit(&self, place: &Path) -> Option<Limit> {
        let Files { version, limits, used, reclaimable, .. } = self.files;
        let read = |name: &str| fs::read_to_string(place.join(name)).ok();
        let number = |name: &&str| read(name)?.trim().parse::<u64>().ok();
        let bytes = limits.iter().filter_map(number).min()?;
        let stat = read("memory.stat").unwrap_or_default();
        let cache = reclaimable.iter().filter_map(|name| field(&stat, name)).fold(0, u64::saturating_add);
        let used = number(used).unwrap_or(0).saturating_sub(cache);
        let bound = Bound::ControlGroup { version: *version, place: place.to_owned() };
        Some(Limit { bound, bytes, used })
    }
}

/// `ulimit -d` and `ulimit -v`.
fn process_limits(limits: &str, status: &str) -> Vec<Limit> {
    let limit = |name: &str, used: &str, bound: Bound| {
        let soft = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
        let (bytes, used) = (soft.parse().ok()?, field(status, used).unwrap_or(0));
        Some(Limit { bound, bytes, used })
    };
    let data = limit("Max data size", "VmData:", Bound::DataSize);
    let addresses = limit("Max address space", "VmSize:", Bound::AddressSpace);
    data.into_iter().chain(addresses).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       24576000 kB\nMemFree:          300000 kB\nMemAvailable:   20480000 kB\n\
                           Buffers:               0 kB\nCached:          9000000 kB\nHugePages_Total:       0\n";

    #[test]
    fn meminfo_of_new_and_old_kernels() {
        let check = |text: &str, expected: Option<(u64, u64)>| {
            assert_eq!(meminfo(text), expected.map(|(a, b)| (a * 1024, b * 1024)), "{text}");
        };
        check(MEMINFO, Some((24_576_000, 20_480_000)));
        check("MemTotal: 100 kB\nMemFree: 10 kB\nCached: 30 kB\n", Some((100, 25)));
        check("MemTotal: 100 kB\nMemAvailable: 900 kB\n", Some((100, 100)));
        check("MemTotal: 100 MB\nMemAvailable: 9 kB\n", None);
        let most = u64::MAX / 1024;
        check(&format!("MemTotal: 1 kB\nMemFree: {most} kB\nCached: {most} kB\n"), Some((1, 1)));
        check("MemTotal: lots kB\n", None);
        check("", None);
    }

    #[test]
    fn groups_of_both_versions() {
        let check = |text: &str, expected: &[(u8, &str)]| {
            let found = groups(text);
            let found: Vec<_> = found.iter().map(|g| (g.files.version, g.path)).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("0::/user.slice/a:b.scope\n", &[(2, "/user.slice/a:b.scope")]);
        check("9:name=systemd:/\n4:memory:/docker/0a\n1:cpu,cpuacct:/\n", &[(1, "/docker/0a")]);
        check("3:cpuset,memory:/x\n0::/\n", &[(1, "/x"), (2, "/")]);
        check("nonsense\n1:\n\n", &[]);
    }

    #[test]
    fn process_limits_and_what_is_used_of_them() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             2000000              unlimited            bytes     \n\
                      Max address space         unlimited            unlimited            bytes     \n";
        let found = process_limits(limits, "VmPeak:\t  900 kB\nVmSize:\t  800 kB\nVmData:\t     100 kB\n");
        assert_eq!(found, [Limit { bound: Bound::DataSize, bytes: 2_000_000, used: 102_400 }]);
        let found = process_limits("Max address space   3000000   unlimited   bytes", "");
        assert_eq!(found, [Limit { bound: Bound::AddressSpace, bytes: 3_000_000, used: 0 }]);
        assert_eq!(process_limits("", ""), []);
    }

    /// A machine of 24 GB with these files.
    fn machine(files: &[(&str, &str)]) -> Machine {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Machine::read_under(root.path()).unwrap()
    }

    #[test]
    fn the_narrowest_bound_counts() {
        let check = |files: &[(&str, &str)], room: u64, by: &str| {
            let machine = machine(files);
            let (found, bound) = machine.room();
            let name = bound.to_string();
            assert_eq!(found, room, "{machine:?}");
            assert!(name.contains(by), "{name}");
        };
        let free = 20_480_000 * 1024;
        check(&[], free, "machine");
        let v2 = [("proc/self/cgroup", "0::/a/b\n"), ("sys/fs/cgroup/a/b/memory.max", "max\n")];
        check(&v2, free, "machine");
        // Page cache can be given up; the group around it has the say.
        let around = [
            ("sys/fs/cgroup/a/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/a/memory.high", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "1500000000\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "anon 400000000\ninactive_file 900000000\nactive_file 100000000\n",
            ),
        ];
        check(&[&v2[..], &around].concat(), 2_147_483_648 - 500_000_000, "/a");
        let high = [("sys/fs/cgroup/a/b/memory.high", "1000000\n")];
        check(&[&v2[..], &around, &high].concat(), 1_000_000, "/a/b");
        // In a container, with the path of the host.
        let v1 = [
            ("proc/self/cgroup", "4:memory:/docker/0a1b\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1294967296\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1000000000\n"),
        ];
        check(&v1, 4_000_000_000, "v1");
        let none = [
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
        ];
        check(&none, free, "machine");
        let full = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "1000"),
            ("sys/fs/cgroup/memory.current", "5000"),
        ];
        check(&full, 0, "v2");
        // Figures that no kernel gives.
        let most = u64::MAX.to_string();
        let stat = format!("inactive_file {most}\nactive_file {most}\nslab_reclaimable {most}\n");
        check(&[&full[..], &[("sys/fs/cgroup/memory.stat", &stat)]].concat(), 1000, "v2");
    }

    #[test]
    fn a_machine_without_proc_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        Machine::read_under(root.path()).unwrap_err();
        if cfg!(target_os = "linux") {
            let machine = Machine::read().unwrap();
            assert!(machine.room().0 <= machine.total);
            assert!(peak_rss().unwrap() > 100_000);
        }
    }
}
