//! A client of Chromium: opens pages without a window, clicks and types with input events, and reads what the page shows.
//! Speaks the DevTools protocol (<https://chromedevtools.github.io/devtools-protocol/>) over pipes, without network.

use serde_json::{Value, json};
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A browser with one page.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    profile: PathBuf,
    session: Option<String>,
    number: u64,
}

/// The command of Chromium: `PLIMSOLL_CHROMIUM`, or the first of the usual names that starts.
fn chromium() -> Option<String> {
    let given = env::var("PLIMSOLL_CHROMIUM").ok();
    let usual = ["chromium", "chromium-browser", "google-chrome"].map(str::to_owned);
    let starts = |name: &String| {
        let ran = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        ran.is_ok_and(|status| status.success())
    };
    given.into_iter().chain(usual).find(starts)
}

impl Browser {
    /// Starts the browser with a window of `width` pixels; `None`, with a message, where there is none.
    pub fn start(test: &str, width: u32) -> Option<Self> {
        let Some(name) = chromium() else {
            println!("skipped: there is no Chromium here; set PLIMSOLL_CHROMIUM to its command");
            return None;
        };
        let profile = env::temp_dir().join(format!("plimsoll-browser-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&profile);
        // Chromium reads messages from descriptor 3 and writes them to descriptor 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh", &name])
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("--window-size={width},1000"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let input = child.stdin.take().expect("piped");
        let output = child.stdout.take().expect("piped");
        let mut browser =
            Browser { child, input, output: BufReader::new(output), profile, session: None, number: 0 };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let session =
            browser.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        let metrics = json!({"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": false});
        browser.call("Emulation.setDeviceMetricsOverride", metrics);
        Some(browser)
    }

    /// Calls a method and returns its result. Events that arrive meanwhile are dropped.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.number += 1;
        let mut message = json!({"id": self.number, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).expect("the browser reads");
        loop {
            let mut bytes = vec![];
            self.output.read_until(0, &mut bytes).expect("the browser writes");
            assert_eq!(bytes.pop(), Some(0), "{method}: the browser has ended");
            let answer: Value = serde_json::from_slice(&bytes).expect("JSON");
            if answer["id"] == self.number {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// Opens a file and waits until it is loaded.
    pub fn open(&mut self, path: &Path) {
        let answer = self.call("Page.navigate", json!({"url": format!("file://{}", path.display())}));
        assert!(answer["errorText"].is_null(), "{answer}");
        while self.value("document.readyState") != "complete" || self.value("location.protocol") != "file:" {}
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let answer = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Clicks in the middle of the element that a CSS selector finds.
    pub fn click(&mut self, selector: &str) {
        let place = self.value(&format!(
            "(() => {{ const e = document.querySelector({selector:?}); e.scrollIntoView({{block: 'center', behavior: \
             'instant'}}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Clicks into a field and types a text.
    pub fn type_into(&mut self, selector: &str, text: &str) {
        self.click(selector);
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Presses a key in the element that has the focus.
    pub fn press(&mut self, key: &str, text: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({"type": kind, "key": key, "code": key, "text": text}));
        }
    }

    /// Chooses the option of a select whose text begins with `text`.
    pub fn choose(&mut self, selector: &str, text: &str) {
        // A menu of options is a window of the system, which a browser without a window cannot show.
        let chosen = self.value(&format!(
            "(() => {{ const e = document.querySelector({selector:?}); const o = [...e.options].find((o) => \
             o.text.startsWith({text:?})); e.value = o.value; e.dispatchEvent(new Event('input', {{bubbles: true}})); return \
             o.text; }})()"
        ));
        assert!(chosen.as_str().is_some_and(|chosen| chosen.starts_with(text)), "{chosen}");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Processes of the browser may still write into the folder.
        for _ in 0..50 {
            if fs::remove_dir_all(&self.profile).is_ok() || !self.profile.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
