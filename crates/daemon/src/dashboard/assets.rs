//! The files of the pages, which are part of the program: the dashboard works without a network.

use super::App;
use super::frame;
use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::sync::OnceLock;

/// A file.
struct Asset {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

macro_rules! assets {
    ($($name:literal, $kind:expr, $path:literal);* $(;)?) => {
        const ASSETS: &[Asset] =
            &[$(Asset { name: $name, kind: $kind, bytes: include_bytes!($path) }),*];
    };
}

assets! {
    "app.css", STYLE, "static/app.css";
    "app.js", SCRIPT, "static/app.js";
    "charts.js", SCRIPT, "static/charts.js";
    "terminal.js", SCRIPT, "static/terminal.js";
    "theme.js", SCRIPT, "static/theme.js";
    "icon.svg", "image/svg+xml", "static/icon.svg";
    "htmx.min.js", SCRIPT, "vendor/htmx.min.js";
    "uplot.min.js", SCRIPT, "vendor/uplot.min.js";
    "uplot.min.css", STYLE, "vendor/uplot.min.css";
    "xterm.js", SCRIPT, "vendor/xterm.js";
    "xterm.css", STYLE, "vendor/xterm.css";
    "xterm-addon-fit.js", SCRIPT, "vendor/xterm-addon-fit.js";
}

/// Their paths.
pub(super) fn routes() -> Router<App> {
    Router::new().route("/assets/{version}/{name}", get(serve))
}

/// The path of a file, which changes with the files.
pub(super) fn path(name: &str) -> String {
    debug_assert!(ASSETS.iter().any(|asset| asset.name == name), "{name}");
    format!("/assets/{}/{name}", version())
}

fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        for asset in ASSETS {
            hasher.update(asset.bytes);
        }
        hasher.finalize().to_hex()[..12].to_owned()
    })
}

async fn serve(Path((asked, name)): Path<(String, String)>) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return frame::plain(StatusCode::NOT_FOUND, "there is no such file");
    };
    // A page of an older daemon gets the files that there are.
    let kept = match asked == version() {
        true => "public, max-age=31536000, immutable",
        false => "no-store",
    };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(asset.kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static(kept)),
    ];
    (headers, asset.bytes).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};
    use std::fs;
    use std::path::Path as FilePath;

    /// What all files together may take in the program.
    const TOTAL_MAX: usize = 700 << 10;

    #[test]
    fn libraries_are_those_that_were_fetched() {
        let place = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("src/dashboard/vendor");
        let sums = fs::read_to_string(place.join("SHA256SUMS")).unwrap();
        let mut listed = Vec::new();
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").unwrap();
            let found = Sha256::digest(fs::read(place.join(name)).unwrap());
            let found: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, sum, "{name}: run scripts/vendor-dashboard");
            listed.push(name.to_owned());
        }
        for asset in ASSETS {
            let is_ours = place.join("../static").join(asset.name).exists();
            assert!(is_ours || listed.iter().any(|name| name == asset.name), "{}", asset.name);
        }
    }

    #[test]
    fn all_of_them_are_small() {
        let total: usize = ASSETS.iter().map(|asset| asset.bytes.len()).sum();
        assert!(total < TOTAL_MAX, "{total}");
    }

    #[test]
    fn none_refers_to_another_host() {
        for asset in ASSETS {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            // Names of XML name spaces, and addresses in messages, are not fetched.
            for needle in
                ["src=\"http", "url(http", "@import", "importScripts(", "sourceMappingURL="]
            {
                assert!(!text.contains(needle), "{}: {needle}", asset.name);
            }
        }
    }
}
