//! A model's HTTP API, asked from this process with the owner's key: Chat Completions, or Messages. No
//! program runs, so there is nothing to keep apart; time and size are bounded here.

use std::time::{Duration, Instant};

use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request};
use serde_json::{Value, json};

use super::dialogue::{Done, parse_answer, source, tokens, unknown};
use super::drive::{self, Outcome};
use super::provider::Provider;
use super::usage::Seen;
use super::{Adapter, ApiStyle, Control, Job, Ran, claude};
use crate::acp::code::{Code, Error};
use crate::acp::json as strict;
use crate::runtime::clock::unix_now;
use crate::runtime::http_client::Bounds;
use crate::runtime::sandbox;

/// Bytes of an answer, beyond those of the output: what is around it.
const AROUND: usize = 1 << 20;
/// Tokens that Messages, which demands a number, may write.
const TOKENS_MAX: u64 = 8192;

/// Makes one run.
pub(super) async fn run(adapter: &Adapter, provider: &Provider, job: Job, control: Control) -> Ran {
    let (started_at, began) = (unix_now(), Instant::now());
    let wall = Duration::from_millis(job.max_wall_ms.min(sandbox::WALL_MAX_MS));
    let mut hold = control.hold.clone();
    let asking = async {
        // At the end of a budget calls wait; a caller that has gone holds nothing.
        drop(hold.wait_for(|held| !held).await);
        ask(adapter, provider, &job, wall).await
    };
    let result = tokio::select! {
        result = asking => result,
        () = control.cancel.cancelled() => Err(Error::new(Code::Cancelled, "the run was cancelled")),
    };
    let metrics = result.as_ref().ok().and_then(|done| done.metrics.clone());
    let metrics = metrics.unwrap_or_else(unknown);
    let source = source(&metrics);
    let outcome = Outcome { result, end: None, started_at, began, metrics, source, model: None };
    drive::ran(adapter, &job, outcome)
}

async fn ask(
    adapter: &Adapter,
    provider: &Provider,
    job: &Job,
    wall: Duration,
) -> Result<Done, Error> {
    let fail = |message: String| Error::new(Code::AdapterFailed, message);
    let model = adapter.options.model.as_deref().unwrap_or_default();
    let prompt = claude::prompt(job)?;
    let prompt = String::from_utf8_lossy(&prompt);
    let messages = json!([{"role": "user", "content": prompt}]);
    let (path, question) = match provider.style {
        ApiStyle::Openai => ("chat/completions", json!({"model": model, "messages": messages})),
        ApiStyle::Anthropic => {
            ("messages", json!({"model": model, "max_tokens": TOKENS_MAX, "messages": messages}))
        }
    };
    let mut request = Request::new(Bytes::from(question.to_string()));
    *request.method_mut() = Method::POST;
    let path = format!("{}/{path}", provider.root());
    *request.uri_mut() = path.parse().map_err(|_| fail("the endpoint's path is none".into()))?;
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if provider.style == ApiStyle::Anthropic {
        headers.insert("anthropic-version", HeaderValue::from_static("2023-06-01"));
    }
    if let Some(key) = provider.key_value() {
        headers.insert(provider.key_header(), key);
    }
    let most = usize::try_from(job.max_output_bytes).unwrap_or(usize::MAX);
    let bounds = Bounds { body: most.saturating_mul(2).saturating_add(AROUND), within: wall };
    let answer = provider.client().send(request, bounds).await.map_err(|e| fail(e.to_string()))?;
    let status = answer.status();
    if !status.is_success() {
        return Err(fail(format!("the endpoint answered {}", status.as_u16())));
    }
    let answer = strict::parse(answer.body(), bounds.body)
        .map_err(|_| fail("the endpoint's answer is no JSON".into()))?;
    let mut seen = Seen::default();
    seen.take(&answer);
    Ok(Done {
        output: parse_answer(&text(provider.style, &answer))?,
        metrics: seen.told.then(|| tokens(seen.input, seen.output)),
        model: seen.model,
    })
}

/// The text of an answer.
fn text(style: ApiStyle, answer: &Value) -> String {
    match style {
        ApiStyle::Openai => {
            let content = answer.pointer("/choices/0/message/content");
            content.and_then(Value::as_str).unwrap_or_default().to_owned()
        }
        ApiStyle::Anthropic => {
            let blocks = answer.get("content").and_then(Value::as_array).into_iter().flatten();
            blocks.filter_map(|block| block.get("text").and_then(Value::as_str)).collect()
        }
    }
}
