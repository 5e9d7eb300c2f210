//! Samples and the table they end in.

use std::time::Duration;

/// Durations of one figure.
#[derive(Default)]
pub struct Samples(Vec<Duration>);

impl Samples {
    pub fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    /// The duration that `percent` of the samples do not exceed.
    pub fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
        sorted.get(at).copied().unwrap_or_default()
    }

    pub fn median(&self) -> Duration {
        self.percentile(50)
    }
}

/// The middle one of several results of the same kind.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

pub fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

const COLUMNS: (usize, usize) = (58, 12);

fn row(cells: [&str; 5]) {
    let (wide, narrow) = COLUMNS;
    let [what, a, b, ratio, goal] = cells;
    println!("{what:<wide$} {a:>narrow$} {b:>narrow$} {ratio:>narrow$}   {goal}");
}

/// Begins a table.
pub fn heading(title: &str, a: &str, b: &str) {
    println!();
    row([title, a, b, "ratio", "goal"]);
    let (wide, narrow) = COLUMNS;
    println!("{}", "-".repeat(wide + 3 * (narrow + 1) + 9));
}

/// A latency in microseconds. The ratio is that of the medians.
pub fn latency(what: &str, samples: &Samples, floor: Option<&Samples>, goal: &str) {
    let ratio = floor.map(|floor| micros(samples.median()) / micros(floor.median()));
    row([
        what,
        &format!("{:.1} us", micros(samples.median())),
        &format!("{:.1} us", micros(samples.percentile(99))),
        &ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
        goal,
    ]);
}

/// A rate per second, and what one costs.
pub fn rate(what: &str, per_second: f64, floor: Option<f64>, goal: &str) {
    row([
        what,
        &format!("{per_second:.0}/s"),
        &format!("{:.2} us", 1e6 / per_second),
        &floor.map(|floor| format!("{:.3}", per_second / floor)).unwrap_or_default(),
        goal,
    ]);
}

/// Anything else, with up to two figures.
pub fn figures(what: &str, a: &str, b: &str, goal: &str) {
    row([what, a, b, "", goal]);
}
