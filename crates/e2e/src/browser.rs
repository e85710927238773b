//! A headless Chromium of Debian, driven by WebDriver (W3C WebDriver 2) over plain JSON.

use crate::binary::build_directory;
use crate::daemon::wait_until;
use crate::ports::free_port;
use crate::skip::skip;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Programs of the packages chromium and chromium-driver.
const CHROMIUM: &str = "/usr/bin/chromium";
const DRIVER: &str = "/usr/bin/chromedriver";
/// How long one command may take.
const PATIENCE: Duration = Duration::from_secs(90);
/// Key of the reference of an element (WebDriver, 12.2).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one window.
pub struct Browser {
    driver: Child,
    session: String,
    agent: ureq::Agent,
    _profile: TempDir,
}

/// The size of a window, and the colours that its user wants.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Dark colours.
    pub is_dark: bool,
}

impl Browser {
    /// Starts one; `None` where there is no Chromium, which is said loudly.
    pub fn start() -> Option<Self> {
        for program in [CHROMIUM, DRIVER] {
            if !Path::new(program).exists() {
                skip(&format!("there is no {program}; scripts/setup installs it"));
                return None;
            }
        }
        let profile = TempDir::new().expect("a directory for the profile");
        let port = free_port();
        let driver = Command::new(DRIVER)
            .arg(format!("--port={port}"))
            // What the browser writes besides its profile goes there, too.
            .env("HOME", profile.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver starts");
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false);
        let agent: ureq::Agent = config.build().into();
        let base = format!("http://127.0.0.1:{port}");
        let mut browser = Self { driver, session: base, agent, _profile: profile };
        wait_until("chromedriver answers", || {
            browser.agent.get(format!("{}/status", browser.session)).call().is_ok()
        });
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
        ];
        let mut arguments: Vec<_> = arguments.map(str::to_owned).into();
        arguments.push(format!("--user-data-dir={}", browser._profile.path().display()));
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments, "binary": CHROMIUM},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let made = browser.call("POST", "/session", &capabilities);
        let id = made["sessionId"].as_str().unwrap_or_else(|| panic!("no session: {made}"));
        browser.session = format!("{}/session/{id}", browser.session);
        Some(browser)
    }

    /// One command; its value.
    #[track_caller]
    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let address = format!("{}{path}", self.session);
        let answer = match method {
            "GET" => self.agent.get(&address).call(),
            "DELETE" => self.agent.delete(&address).call(),
            _ => self.agent.post(&address).send_json(body),
        };
        let mut answer = answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        let value: Value =
            answer.body_mut().with_config().limit(64 << 20).read_json().expect("JSON");
        value["value"].clone()
    }

    #[track_caller]
    fn done(&self, method: &str, path: &str, body: &Value) -> Value {
        let value = self.call(method, path, body);
        assert!(value["error"].is_null(), "{method} {path} {body}: {value}");
        value
    }

    /// Loads a page.
    #[track_caller]
    pub fn open(&self, address: &str) {
        self.done("POST", "/url", &json!({"url": address}));
    }

    /// The address of the page.
    pub fn address(&self) -> String {
        self.done("GET", "/url", &Value::Null).as_str().unwrap_or_default().to_owned()
    }

    /// The first element of a CSS selector.
    fn find(&self, selector: &str) -> Option<String> {
        let found =
            self.call("POST", "/element", &json!({"using": "css selector", "value": selector}));
        found[ELEMENT].as_str().map(str::to_owned)
    }

    /// Waits for an element.
    #[track_caller]
    pub fn wait_for(&self, selector: &str) {
        wait_until(&format!("{} has {selector}", self.address()), || self.find(selector).is_some());
    }

    #[track_caller]
    fn element(&self, selector: &str) -> String {
        self.wait_for(selector);
        self.find(selector).unwrap_or_else(|| panic!("no {selector}"))
    }

    /// Clicks an element; again if the page was just drawn anew.
    #[track_caller]
    pub fn click(&self, selector: &str) {
        for _ in 0..20 {
            let element = self.element(selector);
            let clicked = self.call("POST", &format!("/element/{element}/click"), &json!({}));
            if clicked["error"].is_null() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("{selector} cannot be clicked");
    }

    /// Types into an element.
    #[track_caller]
    pub fn type_into(&self, selector: &str, text: &str) {
        let element = self.element(selector);
        self.done("POST", &format!("/element/{element}/value"), &json!({"text": text}));
    }

    /// What a script returns.
    #[track_caller]
    pub fn run(&self, script: &str) -> Value {
        self.done("POST", "/execute/sync", &json!({"script": script, "args": []}))
    }

    /// The text that the page shows.
    #[track_caller]
    pub fn text(&self) -> String {
        self.run("return document.body.innerText").as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the page shows a text.
    #[track_caller]
    pub fn wait_for_text(&self, text: &str) {
        wait_until(&format!("{} shows {text:?}", self.address()), || self.text().contains(text));
    }

    /// Makes the window so large, with these colours.
    #[track_caller]
    pub fn show_on(&self, screen: Screen) {
        let Screen { width, height, is_dark } = screen;
        let device = |command: &str, parameters: Value| {
            let body = json!({"cmd": command, "params": parameters});
            self.done("POST", "/goog/cdp/execute", &body);
        };
        device(
            "Emulation.setDeviceMetricsOverride",
            json!({
                "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
            }),
        );
        let scheme = if is_dark { "dark" } else { "light" };
        device(
            "Emulation.setEmulatedMedia",
            json!({
                "features": [{"name": "prefers-color-scheme", "value": scheme}],
            }),
        );
    }

    /// Keeps a picture of the window; where.
    #[track_caller]
    pub fn keep_picture(&self, name: &str) -> PathBuf {
        let body = json!({"cmd": "Page.captureScreenshot", "params": {"format": "png"}});
        let taken = self.done("POST", "/goog/cdp/execute", &body);
        let png = decode(taken["data"].as_str().expect("a picture"));
        // Below `target`, where `tests` of the build directory is not.
        let build = build_directory();
        let target = build.ancestors().nth(2).expect("it is below target");
        let place = target.join("tests/screenshots");
        fs::create_dir_all(&place).expect("a directory for pictures");
        let path = place.join(format!("{name}.png"));
        fs::write(&path, png).expect("the picture is written");
        path
    }

    /// What scripts and the browser have complained of since the last call.
    pub fn complaints(&self) -> Vec<String> {
        let lines = self.done("POST", "/se/log", &json!({"type": "browser"}));
        let lines = lines.as_array().cloned().unwrap_or_default();
        lines.iter().filter_map(|line| line["message"].as_str().map(str::to_owned)).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have gone already.
        let _ = self.agent.delete(&self.session).call();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// Bytes of base64 (RFC 4648, 4).
fn decode(text: &str) -> Vec<u8> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => Some(letter - b'A'),
        b'a'..=b'z' => Some(letter - b'a' + 26),
        b'0'..=b'9' => Some(letter - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for six in text.bytes().filter_map(value) {
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn base64_is_decoded() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm9vYmFy", "foobar")] {
            assert_eq!(super::decode(text), bytes.as_bytes());
        }
    }
}
