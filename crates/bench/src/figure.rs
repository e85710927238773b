//! Figures, as SVG.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;

/// Why there is no figure.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the figure ({0})")]
pub struct FigureError(String);

/// Width of every figure, in pixels.
const WIDTH: u32 = 960;
/// Height of a figure of lines.
const HEIGHT: u32 = 540;
/// Sizes of text; the crate draws it smaller by a quarter.
const TEXT: u32 = 16;
const TITLE: u32 = 22;
/// Height of one bar.
const BAR: u32 = 11;
/// Of what is above and below the bars.
const FRAME: u32 = 120;
/// Told apart by people who see colours differently, too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x8a, 0x8a, 0x8a),
    RGBColor(0xd5, 0x5e, 0x00),
];

/// The bars of one colour.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub name: String,
    /// One for each category, where there is one.
    pub values: Vec<Option<f64>>,
    /// A mark on each bar; may be empty.
    pub marks: Vec<Option<f64>>,
}

/// Groups of horizontal bars.
#[derive(Clone, Debug)]
pub(crate) struct Bars<'a> {
    pub title: &'a str,
    pub axis: &'a str,
    pub categories: Vec<String>,
    pub series: Vec<Series>,
    pub logarithmic: bool,
}

/// Lines over a common axis.
#[derive(Clone, Debug)]
pub(crate) struct Lines<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// A name and its points.
    pub series: Vec<(String, Vec<(f64, f64)>)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn failed(error: impl std::fmt::Display) -> FigureError {
    FigureError(error.to_string())
}

fn colour(number: usize) -> RGBColor {
    COLOURS[number % COLOURS.len()]
}

fn draw(
    height: u32,
    picture: impl FnOnce(&Area<'_>) -> Result<(), FigureError>,
) -> Result<String, FigureError> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    picture(&area)?;
    area.present().map_err(failed)?;
    drop(area);
    Ok(svg)
}

impl Bars<'_> {
    pub(crate) fn svg(&self) -> Result<String, FigureError> {
        let bars = (self.categories.len() * (self.series.len() + 1)) as u32;
        let values = || self.series.iter().flat_map(|series| &series.values).flatten();
        let largest = values().copied().fold(1.0, f64::max);
        draw(FRAME + bars * BAR, |area| match self.logarithmic {
            // To the right there is room for the legend.
            true => self.picture(area, (1.0..largest * 8.0).log_scale(), 1.0),
            false => self.picture(area, 0.0..largest * 1.25, 0.0),
        })
    }

    fn picture<X>(
        &self,
        area: &Area<'_>,
        axis: impl plotters::coord::ranged1d::AsRangedCoord<CoordDescType = X, Value = f64>,
        from: f64,
    ) -> Result<(), FigureError>
    where
        X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let rows = self.categories.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, ("sans-serif", TITLE))
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(150)
            // The first category is the uppermost.
            .build_cartesian_2d(axis, rows..0.0)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .x_desc(self.axis)
            .y_labels(0)
            .x_label_formatter(&|value| format!("{value:.0}"))
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .light_line_style(TRANSPARENT)
            .draw()
            .map_err(failed)?;
        let thickness = 1.0 / (self.series.len() as f64 + 1.0);
        for (number, series) in self.series.iter().enumerate() {
            let fill = colour(number);
            let top = |row: usize| row as f64 + thickness * (number as f64 + 0.5);
            let bars = series.values.iter().enumerate().filter_map(|(row, value)| {
                let corners = [(from, top(row)), ((*value)?, top(row) + thickness)];
                Some(Rectangle::new(corners, fill.filled()))
            });
            chart
                .draw_series(bars)
                .map_err(failed)?
                .label(&series.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 14, y + 4)], fill.filled()));
            let marks = series.marks.iter().enumerate().filter_map(|(row, mark)| {
                let ends = vec![((*mark)?, top(row)), ((*mark)?, top(row) + thickness)];
                Some(PathElement::new(ends, BLACK.stroke_width(2)))
            });
            chart.draw_series(marks).map_err(failed)?;
        }
        self.name_categories(area, &chart)?;
        legend(&mut chart, SeriesLabelPosition::UpperRight)
    }

    /// Names beside their groups: the axis itself would number them.
    fn name_categories<X>(
        &self,
        area: &Area<'_>,
        chart: &ChartContext<
            '_,
            SVGBackend<'_>,
            Cartesian2d<X, plotters::coord::types::RangedCoordf64>,
        >,
    ) -> Result<(), FigureError>
    where
        X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        use plotters::style::text_anchor::{HPos, Pos, VPos};
        let style =
            ("sans-serif", TEXT).into_text_style(area).pos(Pos::new(HPos::Right, VPos::Center));
        let (left, _) = chart.plotting_area().get_pixel_range();
        for (row, name) in self.categories.iter().enumerate() {
            let x_of_any_value = chart.plotting_area().get_x_range().start;
            let (_, y) = chart.backend_coord(&(x_of_any_value, row as f64 + 0.5));
            area.draw_text(name, &style, (left.start - 8, y)).map_err(failed)?;
        }
        Ok(())
    }
}

impl Lines<'_> {
    pub(crate) fn svg(&self) -> Result<String, FigureError> {
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let right = points().map(|point| point.0).fold(1.0, f64::max);
        let top = points().map(|point| point.1).fold(1.0, f64::max) * 1.1;
        draw(HEIGHT, |area| {
            let mut chart = ChartBuilder::on(area)
                .caption(self.title, ("sans-serif", TITLE))
                .margin(10)
                .x_label_area_size(45)
                .y_label_area_size(80)
                .build_cartesian_2d(0.0..right, 0.0..top)
                .map_err(failed)?;
            chart
                .configure_mesh()
                .x_desc(self.x)
                .y_desc(self.y)
                .x_label_formatter(&|value| format!("{value:.0}"))
                .y_label_formatter(&|value| format!("{value:.0}"))
                .label_style(("sans-serif", TEXT))
                .axis_desc_style(("sans-serif", TEXT))
                .light_line_style(TRANSPARENT)
                .draw()
                .map_err(failed)?;
            for (number, (name, points)) in self.series.iter().enumerate() {
                let stroke = colour(number).stroke_width(2);
                let line = LineSeries::new(points.iter().copied(), stroke).point_size(2);
                chart
                    .draw_series(line)
                    .map_err(failed)?
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], stroke));
            }
            legend(&mut chart, SeriesLabelPosition::UpperLeft)
        })
    }
}

fn legend<'a, 'b: 'a, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>,
    position: SeriesLabelPosition,
) -> Result<(), FigureError>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", TEXT))
        .draw()
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_name_what_they_show() {
        let series = |name: &str, values: Vec<Option<f64>>| Series {
            name: name.to_owned(),
            values,
            marks: Vec::new(),
        };
        let mut bars = Bars {
            title: "Title",
            axis: "µs",
            categories: vec!["hello-c".into(), "hello-python".into()],
            series: vec![
                series("warm", vec![Some(250.0), Some(2300.0)]),
                series("fork", vec![Some(240.0), None]),
            ],
            logarithmic: true,
        };
        for logarithmic in [true, false] {
            bars.logarithmic = logarithmic;
            let svg = bars.svg().unwrap();
            for text in ["<svg", "Title", "hello-c", "hello-python", "warm", "fork", "µs"] {
                assert!(svg.contains(text), "{text} is missing in {svg}");
            }
        }
        // Without anything to show there is a figure, too.
        bars.categories.clear();
        bars.series.clear();
        assert!(bars.svg().unwrap().contains("Title"));
    }

    #[test]
    fn lines_name_what_they_show() {
        let points = vec![(1.0, 200.0), (1000.0, 250.0)];
        let lines = Lines {
            title: "Title",
            x: "instances",
            y: "µs",
            series: vec![("warm".into(), points)],
        };
        let svg = lines.svg().unwrap();
        for text in ["Title", "instances", "µs", "warm"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}
