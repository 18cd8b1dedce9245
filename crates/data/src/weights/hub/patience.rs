//! Waiting that can be ended: for a request, for the bytes of a body, for a pause. Invariant: the caller is asked at least
//! every [`TICK`] whether to go on, whatever the network, another process or the server's clock does.

use std::io::{self, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::error::HubErrorKind as Kind;

/// Longest time without asking the caller whether to go on.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// Size in bytes of the parts in which a body is passed on.
const PART: usize = 128 << 10;

/// Longest pause that a server may ask for; a request that would have to wait longer fails.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Asks the caller whether to go on; `Err` ends the wait.
pub(super) type GoOn<'a> = &'a mut dyn FnMut() -> Result<(), Kind>;

/// Runs `work` on a thread and waits for its result. A thread whose result is no longer wanted is left to the timeouts of
/// its request.
pub(super) fn patiently<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    go_on: GoOn<'_>,
) -> Result<T, Kind> {
    let (sender, receiver) = sync_channel(1);
    spawn(move || drop(sender.send(work())))?;
    receive(&receiver, go_on)?.ok_or_else(|| Kind::Answer("a request ended without a result".to_owned()))
}

/// The bytes of a body, which a thread reads.
pub(super) struct BodyParts {
    receiver: Receiver<io::Result<Vec<u8>>>,
}

impl BodyParts {
    /// Starts to read `body`.
    pub(super) fn read(body: impl Read + Send + 'static) -> Result<Self, Kind> {
        // Two parts: one is written to the disk while the next arrives.
        let (sender, receiver) = sync_channel(2);
        spawn(move || pass_on(body, &sender))?;
        Ok(Self { receiver })
    }

    /// The next bytes; `None` after the last.
    pub(super) fn next(&mut self, go_on: GoOn<'_>) -> Result<Option<io::Result<Vec<u8>>>, Kind> {
        receive(&self.receiver, go_on)
    }
}

/// Sends the bytes of `body` in parts until its end, its first error, or until nobody receives them.
fn pass_on(mut body: impl Read, sender: &SyncSender<io::Result<Vec<u8>>>) {
    loop {
        let mut part = vec![0; PART];
        let read = body.read(&mut part).map(|n| {
            part.truncate(n);
            part
        });
        let is_last = !matches!(&read, Ok(part) if !part.is_empty());
        if matches!(&read, Ok(part) if part.is_empty()) || sender.send(read).is_err() || is_last {
            return;
        }
    }
}

/// Sleeps for `pause`.
pub(super) fn pause(pause: Duration, go_on: GoOn<'_>) -> Result<(), Kind> {
    let end = Instant::now() + pause;
    loop {
        go_on()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(TICK));
    }
}

/// Waits for the next value; `None` if the sender is gone.
fn receive<T>(receiver: &Receiver<T>, go_on: GoOn<'_>) -> Result<Option<T>, Kind> {
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => go_on()?,
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), Kind> {
    let started = thread::Builder::new().name("hub".to_owned()).spawn(work);
    started.map(drop).map_err(|error| Kind::Answer(format!("no thread for a request can be started ({error})")))
}

/// The pause that the header `Retry-After` asks for: a number of seconds, or a date (RFC 9110, section 10.2.3). `None` if
/// it is neither, or longer than a run waits.
pub(super) fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let pause = match text.trim().parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => date(text.trim())?.duration_since(now).unwrap_or_default(),
    };
    (pause <= LONGEST_PAUSE).then_some(pause)
}

/// The time of a date such as `Sun, 06 Nov 1994 08:49:37 GMT`.
fn date(text: &str) -> Option<SystemTime> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let mut words = text.split_once(", ")?.1.split(' ');
    let day: u64 = words.next()?.parse().ok().filter(|day| (1..=31).contains(day))?;
    let month = words.next()?;
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let year: u64 = words.next()?.parse().ok().filter(|year| (1970..=9999).contains(year))?;
    let mut clock = words.next()?.split(':').map(|part| part.parse::<u64>().ok().filter(|part| *part < 61));
    let [hour, minute, second] = [clock.next()??, clock.next()??, clock.next()??];
    if words.next()? != "GMT" {
        return None;
    }
    // Days from civil (Hinnant): years begin in March, so that the leap day is the last of a year.
    let years = if month > 2 { year } else { year - 1 };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = 365 * years + years / 4 - years / 100 + years / 400 + of_year - 719_468;
    Some(UNIX_EPOCH + Duration::from_secs(86_400 * days + 3600 * hour + 60 * minute + second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_that_a_server_asks_for() {
        // Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110.
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        for (text, wanted) in [
            ("120", Some(120)),
            (" 0 ", Some(0)),
            ("601", None),
            ("soon", None),
            ("-1", None),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(0)),
            ("Sun, 06 Nov 1994 08:50:00 GMT", Some(23)),
            ("Sat, 05 Nov 1994 08:49:37 GMT", Some(0)),
            ("Mon, 07 Nov 1994 08:49:37 GMT", None),
            ("Sun, 06 Foo 1994 08:50:00 GMT", None),
            ("Sun, 06 Nov 1994 08:50 GMT", None),
        ] {
            assert_eq!(retry_after(text, now), wanted.map(Duration::from_secs), "{text}");
        }
        assert_eq!(
            date("Thu, 29 Feb 2024 00:00:00 GMT"),
            Some(UNIX_EPOCH + Duration::from_secs(1_709_164_800))
        );
    }

    #[test]
    fn a_wait_ends_when_the_caller_says_so() {
        let start = Instant::now();
        let mut go_on = || if start.elapsed() > TICK { Err(Kind::Stopped) } else { Ok(()) };
        let stalled = || thread::sleep(Duration::from_secs(5));
        assert!(matches!(patiently(stalled, &mut go_on), Err(Kind::Stopped)));
        assert!(matches!(pause(Duration::from_secs(5), &mut go_on), Err(Kind::Stopped)));
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        let mut parts = BodyParts::read(&b"abc"[..]).expect("a thread");
        let mut always = || Ok(());
        assert_eq!(parts.next(&mut always).expect("waited").expect("a part").expect("read"), b"abc");
        assert!(parts.next(&mut always).expect("waited").is_none());
    }
}
