//! Host memory available to this process, from Linux and the control groups around it. Invariant: this module is the
//! only source of these numbers; a limit that cannot be read counts as none, and nothing is cached.

use plimsoll_graph::Bytes;
use std::fs;
use std::path::Path;

/// Free and total memory, of the host or of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that this process can still allocate without swapping, within all limits.
    pub free: Bytes,
    /// Total memory, within all limits.
    pub total: Bytes,
}

impl Memory {
    /// Memory in use by all processes.
    pub fn used(&self) -> Bytes {
        self.total.saturating_sub(self.free)
    }

    /// Share of the memory that is in use, 0 to 1.
    pub fn share(&self) -> f64 {
        self.used().0 as f64 / self.total.0.max(1) as f64
    }
}

/// The current state of the host's memory.
pub fn available() -> Memory {
    memory(&|path| fs::read_to_string(path).ok())
}

/// The value of a `Name:   123 kB` line in a text such as /proc/meminfo.
pub fn kib(text: &str, name: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    let number = line.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(Bytes(number.saturating_mul(1024)))
}

/// Reads a text file; `None` if it cannot be read.
type ReadFile<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Stands for an unknown amount of memory; larger than any machine's.
const UNKNOWN: Bytes = Bytes(u64::MAX >> 8);

/// Computes the host memory from the files that `read` gives.
fn memory(read: ReadFile<'_>) -> Memory {
    let meminfo = read(Path::new("/proc/meminfo")).unwrap_or_default();
    // A value that cannot be read, for example because no more files may be opened, counts as unlimited. If a step
    // then does not fit, the system refuses it.
    let [free, total] = ["MemAvailable:", "MemTotal:"].map(|name| kib(&meminfo, name).unwrap_or(UNKNOWN));
    let host = Memory { free, total };
    cgroup_limits(read).into_iter().chain(address_space(read)).fold(host, |m, (limit, used)| Memory {
        free: m.free.min(limit.saturating_sub(used)),
        total: m.total.min(limit),
    })
}

/// (limit, used) of this process's address space (`ulimit -v`); `None` if it has no limit.
fn address_space(read: ReadFile<'_>) -> Option<(Bytes, Bytes)> {
    let limits = read(Path::new("/proc/self/limits"))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit = Bytes(line.split_whitespace().next()?.parse().ok()?);
    Some((limit, kib(&read(Path::new("/proc/self/status"))?, "VmSize:")?))
}

/// (limit, used) of this process's memory cgroup and its ancestors, for cgroup versions 1 and 2; a process may be in
/// both. A container may see its own cgroup as the root of the tree, with a path in /proc/self/cgroup that does not
/// exist inside it; reading the root covers this case. Inactive file pages count as used in a cgroup but are
/// reclaimed before an allocation fails, so they are subtracted.
fn cgroup_limits(read: ReadFile<'_>) -> Vec<(Bytes, Bytes)> {
    let own = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mut limits = vec![];
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (root, limit, used, files) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
            c if c.split(',').any(|c| c == "memory") => {
                let root = "/sys/fs/cgroup/memory";
                (root, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
            }
            _ => continue,
        };
        let root = Path::new(root);
        let folder = root.join(path.trim_start_matches('/'));
        for level in folder.ancestors().take_while(|l| l.starts_with(root)) {
            if let (Some(limit), Some(used)) =
                (number(read, &level.join(limit)), number(read, &level.join(used)))
            {
                let reclaimable = statistic(read, level, files).unwrap_or(Bytes::ZERO);
                limits.push((limit, used.saturating_sub(reclaimable)));
            }
        }
    }
    limits
}

/// The number in a file of a cgroup. Without a limit the file contains `max` (version 2), which is `None`, or a number
/// larger than any machine's memory (version 1).
fn number(read: ReadFile<'_>, path: &Path) -> Option<Bytes> {
    read(path)?.trim().parse::<u64>().ok().map(Bytes)
}

/// A statistic of the memory of a cgroup, whose line starts with `name`.
fn statistic(read: ReadFile<'_>, cgroup: &Path, name: &str) -> Option<Bytes> {
    let statistics = read(&cgroup.join("memory.stat"))?;
    statistics.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok().map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   33554432 kB\n");

    /// Free and total memory in GiB of a machine with these files.
    fn of(files: &[(&str, &str)]) -> (u64, u64) {
        let files = [&[MEMINFO], files].concat();
        let read = |path: &Path| {
            files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned())
        };
        let Memory { free, total } = memory(&read);
        (free.0 / GIB, total.0 / GIB)
    }

    #[test]
    fn without_a_limit_it_is_what_linux_has() {
        assert_eq!(of(&[]), (32, 64));
        assert_eq!(of(&[("/proc/self/cgroup", "0::/user.slice\n")]), (32, 64));
        let unlimited = [
            ("/proc/self/cgroup", "12:pids:/x\n4:memory:/x\n0::/y\n"),
            ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "4096\n"),
            ("/sys/fs/cgroup/y/memory.max", "max\n"),
            ("/sys/fs/cgroup/y/memory.current", "4096\n"),
        ];
        assert_eq!(of(&unlimited), (32, 64));
        assert_eq!(memory(&|_| None), Memory { free: UNKNOWN, total: UNKNOWN });
    }

    #[test]
    fn an_address_space_with_a_limit_is_memory() {
        let status = ("/proc/self/status", "VmPeak:  9 kB\nVmSize:\t 1048576 kB\n");
        let limits = |soft| {
            format!("Limit  Soft Limit  Hard Limit  Units\nMax address space  {soft}  unlimited  bytes\n")
        };
        assert_eq!(of(&[("/proc/self/limits", &limits("3221225472")), status]), (2, 3));
        assert_eq!(of(&[("/proc/self/limits", &limits("unlimited")), status]), (32, 64));
    }

    #[test]
    fn version_2_is_read_along_its_path() {
        let own = ("/proc/self/cgroup", "0::/a.slice/b.scope\n");
        let limits = [
            own,
            ("/sys/fs/cgroup/a.slice/b.scope/memory.max", "17179869184\n"),
            ("/sys/fs/cgroup/a.slice/b.scope/memory.current", "1073741824\n"),
        ];
        assert_eq!(of(&limits), (15, 16));
        // Limits of ancestors count too, including the memory that other processes use.
        let above = [
            ("/sys/fs/cgroup/a.slice/memory.max", "21474836480\n"),
            ("/sys/fs/cgroup/a.slice/memory.current", "18253611008\n"),
        ];
        assert_eq!(of(&[&limits[..], &above].concat()), (3, 16));
        // 8 GiB of the other processes' memory are inactive file pages.
        let stat =
            "anon 1\nfile 9663676416\ninactive_anon 7\ninactive_file 8589934592\nactive_file 1073741824\n";
        let files = [("/sys/fs/cgroup/a.slice/memory.stat", stat)];
        assert_eq!(of(&[&limits[..], &above, &files].concat()), (11, 16));
        // Usage may exceed the limit while pages are written out.
        let over = [
            own,
            ("/sys/fs/cgroup/a.slice/memory.max", "1073741824"),
            ("/sys/fs/cgroup/a.slice/memory.current", "2147483648"),
        ];
        assert_eq!(of(&over), (0, 1));
    }

    #[test]
    fn version_1_is_read_at_its_path_or_at_the_root_that_a_container_sees() {
        let own = (
            "/proc/self/cgroup",
            "11:cpu,cpuacct:/docker/1f\n7:memory:/docker/1f\n1:name=systemd:/docker/1f\n",
        );
        for folder in ["/sys/fs/cgroup/memory/docker/1f", "/sys/fs/cgroup/memory"] {
            let [limit, used] =
                ["memory.limit_in_bytes", "memory.usage_in_bytes"].map(|f| format!("{folder}/{f}"));
            let limited = [own, (&limit, "8589934592\n"), (&used, "6442450944\n")];
            assert_eq!(of(&limited), (2, 8), "{folder}");
            let stat = (format!("{folder}/memory.stat"), "inactive_file 1\ntotal_inactive_file 4294967296\n");
            assert_eq!(of(&[&limited[..], &[(&stat.0, stat.1)]].concat()), (6, 8), "{folder}");
        }
    }

    #[test]
    fn of_both_versions_the_smaller_counts() {
        let own = ("/proc/self/cgroup", "7:memory:/x\n0::/\n");
        let mut files = [
            own,
            ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "4294967296"),
            ("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "0"),
            ("/sys/fs/cgroup/memory.max", "8589934592"),
            ("/sys/fs/cgroup/memory.current", "7516192768"),
        ];
        assert_eq!(of(&files), (1, 4));
        files[4].1 = "0";
        assert_eq!(of(&files), (4, 4));
    }
}
