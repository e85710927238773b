//! What `contrib/` asks Prometheus for is what there is.

use super::NAMES;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Names of series that the node's metrics can have (OpenMetrics 1.0, "Suffixes").
fn series() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (name, kind) in NAMES {
        let suffixes: &[&str] = match *kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        names.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
    }
    names
}

/// Names that begin with `thaw_` in a text.
fn named(text: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = text.split(|letter| !is_part(letter));
    words.filter(|word| word.starts_with("thaw_")).map(str::to_owned).collect()
}

#[test]
fn dashboards_and_alerts_name_metrics_that_there_are() {
    let series = series();
    assert!(series.contains("thaw_zygotes") && series.contains("thaw_responses_total"));
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    for (file, least) in [("grafana.json", 15), ("alerts.yml", 12)] {
        let named = named(&fs::read_to_string(contrib.join(file)).unwrap());
        assert!(named.len() >= least, "{file}: {named:?}");
        let missing: Vec<_> = named.difference(&series).collect();
        assert!(missing.is_empty(), "{file} names {missing:?}");
    }
    let grafana = fs::read_to_string(contrib.join("grafana.json")).unwrap();
    let grafana: serde_json::Value = serde_json::from_str(&grafana).unwrap();
    assert!(grafana["panels"].as_array().is_some_and(|panels| panels.len() > 10));
}

/// A reader of an alert or a chart finds each metric in the reference, and nothing else.
#[test]
fn the_reference_has_every_metric() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/admin.md");
    let page = fs::read_to_string(page).unwrap();
    let first_cells = page.lines().filter(|line| line.starts_with("| `thaw_"));
    let listed: BTreeSet<_> =
        first_cells.flat_map(|line| named(line.split('|').nth(1).unwrap())).collect();
    let expected: BTreeSet<_> = NAMES
        .iter()
        .map(
            |(name, kind)| {
                if *kind == "counter" { format!("{name}_total") } else { (*name).into() }
            },
        )
        .collect();
    assert_eq!(listed, expected);
}
