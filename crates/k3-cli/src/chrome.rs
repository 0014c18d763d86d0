//! Spans as a trace that Chrome (`chrome://tracing`) and Perfetto show: one complete event for each, with its
//! thread, from its beginning to its end.

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use k3_format::check_replaceable;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Subscriber};
use tracing_subscriber::layer::{Context as LayerContext, Layer};
use tracing_subscriber::registry::LookupSpan;

/// What a trace begins with, and no other list of JSON.
const BEGIN: &str = r#"[
{"name":"process_name","ph":"M","pid":1,"args":{"name":"k3"}}"#;

/// Writes spans into a file.
pub(crate) struct ChromeTrace {
    out: Arc<Mutex<Out>>,
    start: Instant,
}

/// Ends the file when it is dropped.
pub(crate) struct Guard(Arc<Mutex<Out>>);

struct Out {
    file: Box<dyn Write + Send>,
    /// Threads that have been named.
    threads: Vec<u64>,
    failed: Option<io::Error>,
    /// The last line is written. Threads that still read end their spans later.
    ended: bool,
}

/// What is known of a span before it ends.
struct Open {
    at: Instant,
    thread: u64,
    args: Args,
}

/// Fields as JSON members.
#[derive(Default)]
struct Args(String);

impl ChromeTrace {
    /// Begins the file at `path`, which replaces an earlier trace and no other file.
    pub(crate) fn create(path: &Path) -> Result<(Self, Guard)> {
        let writing = || format!("writing a trace to {}", path.display());
        check_replaceable(path, BEGIN.as_bytes()).with_context(writing)?;
        let file = File::create(path).with_context(writing)?;
        Ok(Self::new(Box::new(BufWriter::new(file))))
    }

    fn new(mut file: Box<dyn Write + Send>) -> (Self, Guard) {
        let failed = file.write_all(BEGIN.as_bytes()).err();
        let out = Arc::new(Mutex::new(Out { file, threads: Vec::new(), failed, ended: false }));
        (Self { out: out.clone(), start: Instant::now() }, Guard(out))
    }
}

impl Out {
    fn event(&mut self, json: std::fmt::Arguments<'_>) {
        if !self.ended && self.failed.is_none() {
            self.failed = write!(self.file, ",\n{json}").err();
        }
    }

    fn name_thread(&mut self, thread: u64) {
        if self.threads.contains(&thread) {
            return;
        }
        self.threads.push(thread);
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        let name = serde_json::Value::from(name);
        self.event(format_args!(
            r#"{{"name":"thread_name","ph":"M","pid":1,"tid":{thread},"args":{{"name":{name}}}}}"#
        ));
    }

    fn end(&mut self) -> io::Result<()> {
        self.ended = true;
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.file.write_all(b"\n]\n").and_then(|()| self.file.flush()),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Err(error) = self.0.lock().unwrap_or_else(PoisonError::into_inner).end() {
            crate::output::tell(format_args!("note: the trace is not complete: {error}\n"));
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for ChromeTrace {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut args = Args::default();
        attributes.record(&mut args);
        let thread = this_thread();
        self.out.lock().unwrap_or_else(PoisonError::into_inner).name_thread(thread);
        span.extensions_mut().insert(Open { at: Instant::now(), thread, args });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.args);
        }
    }

    fn on_close(&self, id: Id, context: LayerContext<'_, S>) {
        let end = Instant::now();
        let Some(span) = context.span(&id) else { return };
        let Some(Open { at, thread, args }) = span.extensions_mut().remove::<Open>() else { return };
        let micros = |from: Instant, to: Instant| to.saturating_duration_since(from).as_nanos() as f64 / 1e3;
        let (ts, dur) = (micros(self.start, at), micros(at, end));
        let (name, target, args) = (span.name(), span.metadata().target(), args.0);
        self.out.lock().unwrap_or_else(PoisonError::into_inner).event(format_args!(
            r#"{{"name":"{name}","cat":"{target}","ph":"X","ts":{ts:.3},"dur":{dur:.3},"pid":1,"tid":{thread},"args":{{{args}}}}}"#
        ));
    }
}

impl Args {
    fn member(&mut self, field: &Field, value: std::fmt::Arguments<'_>) {
        let comma = if self.0.is_empty() { "" } else { "," };
        let _ = write!(self.0, "{comma}\"{}\":{value}", field.name());
    }
}

impl Visit for Args {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.member(field, format_args!("{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.member(field, format_args!("{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.member(field, format_args!("{value}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.member(field, format_args!("{}", serde_json::Value::from(value)));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.member(field, format_args!("{}", serde_json::Value::from(format!("{value:?}"))));
    }
}

/// A number for the thread at hand.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

/// Spans that a trace has: the engine's own.
pub(crate) fn filter() -> tracing_subscriber::filter::Targets {
    tracing_subscriber::filter::Targets::new().with_target("k3", Level::DEBUG)
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn trace(run: impl FnOnce()) -> Vec<serde_json::Value> {
        let shared = Shared::default();
        let (layer, guard) = ChromeTrace::new(Box::new(shared.clone()));
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter()));
        tracing::subscriber::with_default(subscriber, run);
        drop(guard);
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn spans_are_complete_events() {
        let events = trace(|| {
            let span = tracing::debug_span!(
                target: "k3_experts", "fetch", layer = 3, what = "a \"b\"", misses = tracing::field::Empty
            );
            tracing::debug_span!(target: "k3_experts", parent: &span, "wait").in_scope(|| ());
            span.record("misses", 2);
            tracing::debug_span!(target: "other", "not ours").in_scope(|| ());
            tracing::trace_span!(target: "k3_experts", "too fine").in_scope(|| ());
        });
        let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(
            complete.iter().map(|event| event["name"].as_str().unwrap()).collect::<Vec<_>>(),
            ["wait", "fetch"]
        );
        let fetch = complete[1];
        assert_eq!(fetch["args"], serde_json::json!({"layer": 3, "what": "a \"b\"", "misses": 2}));
        let micros = |event: &serde_json::Value, key: &str| event[key].as_f64().unwrap();
        let begin = micros(fetch, "ts");
        let end = begin + micros(fetch, "dur");
        let wait = complete[0];
        assert!((begin..=end).contains(&micros(wait, "ts")));
        assert_eq!(events.iter().filter(|event| event["ph"] == "M").count(), 2);
    }

    #[test]
    fn a_span_that_ends_after_the_trace_is_left_out() {
        let shared = Shared::default();
        let (layer, guard) = ChromeTrace::new(Box::new(shared.clone()));
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter()));
        tracing::subscriber::with_default(subscriber, || {
            let late = tracing::debug_span!(target: "k3_experts", "read");
            tracing::debug_span!(target: "k3_experts", "fetch").in_scope(|| ());
            drop(guard);
            drop(late);
        });
        let events: Vec<serde_json::Value> = serde_json::from_slice(&shared.0.lock().unwrap()).unwrap();
        let names: Vec<&serde_json::Value> = events.iter().map(|event| &event["name"]).collect();
        assert_eq!(names, ["process_name", "thread_name", "fetch"]);
    }

    #[test]
    fn a_run_without_spans_is_an_empty_trace() {
        let events = trace(|| ());
        assert_eq!(events.iter().map(|event| &event["name"]).collect::<Vec<_>>(), ["process_name"]);
    }
}
