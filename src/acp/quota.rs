//! QuotaMeter (design 9.5): what a task has used against what was ordered, by the worker's word and
//! the requester's own count; the larger counts.

use super::log::View;
use super::objects::{Metrics, Usage};
use super::value::Count;

/// A warning comes at this part of a limit, in percent.
const WARN_PERCENT: u64 = 80;

/// The six metrics of a budget, in its order.
const NAMES: [&str; 6] = [
    "maxInputTokens",
    "maxOutputTokens",
    "maxTotalTokens",
    "maxToolCalls",
    "maxWallTimeMs",
    "maxOutputBytes",
];

/// What the meter says of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// 80 percent are used. Told once a limit.
    Warning {
        /// Member of the budget.
        metric: &'static str,
        /// Used so far.
        used: u64,
        /// Limit now.
        limit: u64,
    },
    /// All is used: the work stops until both owners raise the limit.
    Exceeded {
        /// Member of the budget.
        metric: &'static str,
        /// Used so far.
        used: u64,
        /// Limit now.
        limit: u64,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    reported: u64,
    counted: u64,
    warned_at: u64,
}

/// Counters of one task.
#[derive(Clone, Debug, Default)]
pub struct QuotaMeter {
    meters: [Meter; 6],
}

impl QuotaMeter {
    /// Nothing used.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn report(&mut self, values: [Option<Count>; 6]) {
        // Reports are cumulative, so the difference is what is new; a smaller one changes nothing.
        for (meter, value) in self.meters.iter_mut().zip(values) {
            meter.reported = meter.reported.max(value.map_or(0, Count::get));
        }
    }

    /// Charges the metrics of a progress update.
    pub fn progress(&mut self, metrics: &Metrics) {
        let Metrics { input_tokens, output_tokens, total_tokens, tool_calls } = *metrics;
        self.report([input_tokens, output_tokens, total_tokens, tool_calls, None, None]);
    }

    /// Charges a usage receipt.
    pub fn receipt(&mut self, usage: &Usage) {
        self.report([
            usage.input_tokens,
            usage.output_tokens,
            usage.total_tokens,
            usage.tool_calls,
            usage.wall_time_ms,
            usage.output_bytes,
        ]);
    }

    /// Counts a tool call that went through this gateway.
    pub fn tool_call(&mut self) {
        let [_, _, _, calls, _, _] = &mut self.meters;
        calls.counted = calls.counted.saturating_add(1);
    }

    /// Counts bytes of output that arrived here.
    pub fn output_bytes(&mut self, bytes: u64) {
        let [_, _, _, _, _, output] = &mut self.meters;
        output.counted = output.counted.max(bytes);
    }

    /// Tool calls that went through this gateway.
    #[must_use]
    pub const fn proxied_calls(&self) -> u64 {
        let [_, _, _, calls, _, _] = &self.meters;
        calls.counted
    }

    /// What is at its limit, or near it for the first time.
    pub fn alarms(&mut self, view: &View) -> Vec<Alarm> {
        let Some(contract) = view.contract() else { return Vec::new() };
        let budget = &contract.manifest.budget;
        let limits = [
            budget.max_input_tokens,
            budget.max_output_tokens,
            budget.max_total_tokens,
            budget.max_tool_calls,
            budget.max_wall_time_ms,
            budget.max_output_bytes,
        ];
        let mut alarms = Vec::new();
        for ((meter, metric), ordered) in self.meters.iter_mut().zip(NAMES).zip(limits) {
            let Some(limit) = view.limit(metric, ordered) else { continue };
            let used = meter.reported.max(meter.counted);
            if used > limit || (used == limit && limit > 0) {
                alarms.push(Alarm::Exceeded { metric, used, limit });
            } else if used > 0
                && used >= limit.saturating_mul(WARN_PERCENT) / 100
                && meter.warned_at != limit
            {
                meter.warned_at = limit;
                alarms.push(Alarm::Warning { metric, used, limit });
            }
        }
        alarms
    }
}
