//! Small pictures that are part of a page.

use maud::{Markup, html};
use thaw_node::boots::{BootRecord, Phases};

/// A line of the last values.
pub(super) fn sparkline(values: &[f32]) -> Markup {
    const WIDTH: f32 = 120.0;
    const HEIGHT: f32 = 24.0;
    let most = values.iter().copied().fold(0.0, f32::max);
    let step = WIDTH / (values.len().max(2) - 1) as f32;
    let y = |value: f32| {
        if most > 0.0 { HEIGHT - 1.0 - value / most * (HEIGHT - 3.0) } else { HEIGHT - 1.0 }
    };
    let points: Vec<_> = values
        .iter()
        .enumerate()
        .map(|(index, &value)| format!("{:.1},{:.1}", index as f32 * step, y(value)))
        .collect();
    html! {
        svg.spark viewBox="0 0 120 24" preserveAspectRatio="none" aria-hidden="true" {
            @if points.len() > 1 {
                polygon points=(format!("0,{HEIGHT} {} {WIDTH},{HEIGHT}", points.join(" "))) {}
                polyline points=(points.join(" ")) {}
            }
        }
    }
}

/// The names of the phases of a boot, with their classes.
pub(super) const PHASES: [(&str, &str); 5] =
    [("taken", "p1"), ("commanded", "p2"), ("mapped", "p3"), ("entered", "p4"), ("answered", "p5")];

/// Ends of the phases that are known, in nanoseconds since the acceptance.
pub(super) fn ends(phases: &Phases) -> [Option<u64>; 5] {
    let Phases { zygote, received, mapped, first_instruction, first_byte } = *phases;
    [Some(zygote), received, mapped, first_instruction, first_byte]
}

/// The end of the last phase that is known.
pub(super) fn total_ns(boot: &BootRecord) -> u64 {
    ends(&boot.phases).into_iter().flatten().max().unwrap_or(0)
}

/// The phases of a boot, where `scale_ns` is the whole width.
pub(super) fn waterfall(boot: &BootRecord, scale_ns: u64) -> Markup {
    let scale = scale_ns.max(1) as f64;
    let mut begin = 0;
    let mut bars = Vec::new();
    for ((name, class), end) in PHASES.iter().zip(ends(&boot.phases)) {
        let Some(end) = end else { continue };
        let end = end.max(begin);
        let (x, width) = (begin as f64 / scale * 1000.0, (end - begin) as f64 / scale * 1000.0);
        bars.push((
            *class,
            x,
            width.max(1.0),
            format!("{name} after {}", super::format::millis(end as f64 / 1e6)),
        ));
        begin = end;
    }
    html! {
        svg.waterfall viewBox="0 0 1000 16" preserveAspectRatio="none" role="img"
            aria-label=(bars.iter().map(|bar| bar.3.as_str()).collect::<Vec<_>>().join(", ")) {
            @for (class, x, width, title) in &bars {
                rect class=(class) x=(format!("{x:.1}")) y="2" width=(format!("{width:.1}")) height="12" {
                    title { (title) }
                }
            }
        }
    }
}

/// Shares of a whole as one bar: class, share of 1, and what to say.
pub(super) fn shares(parts: &[(&str, f64, String)]) -> Markup {
    let mut x = 0.0;
    let mut rects = Vec::new();
    for (class, share, title) in parts {
        let width = (share * 1000.0).clamp(0.0, 1000.0 - x);
        rects.push((class, x, width, title));
        x += width;
    }
    html! {
        svg.shares viewBox="0 0 1000 10" preserveAspectRatio="none" role="img"
            aria-label=(parts.iter().map(|part| part.2.as_str()).collect::<Vec<_>>().join(", ")) {
            rect.rest x="0" y="0" width="1000" height="10" {}
            @for (class, x, width, title) in &rects {
                rect class=(class) x=(format!("{x:.1}")) y="0" width=(format!("{width:.1}")) height="10" {
                    title { (title) }
                }
            }
        }
    }
}
