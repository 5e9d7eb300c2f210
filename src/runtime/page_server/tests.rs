//! The server over loopback, with a desk that only remembers.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

const TOKEN: &str = "0123456789abcdef";
/// Nothing here takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(20);

struct Echo;

impl Desk for Echo {
    async fn ask(&self, body: Bytes) -> (StatusCode, Vec<u8>) {
        (StatusCode::OK, body.to_vec())
    }

    fn state(&self) -> String {
        "{\"here\":true}".into()
    }
}

const FILES: &[PageFile] = &[PageFile { path: "/", kind: "text/html", text: "<p>hello" }];

struct Page {
    port: u16,
    board: Arc<Board>,
    stop: CancellationToken,
    served: tokio::task::JoinHandle<()>,
}

impl Page {
    fn serve(limits: PageLimits) -> Self {
        let server = PageServer::bind(0, TOKEN.into(), FILES, limits).unwrap();
        let port = server.url().rsplit(':').next().unwrap().parse().unwrap();
        let (board, stop) = (Arc::new(Board::default()), CancellationToken::new());
        let served = tokio::spawn(server.serve(Arc::new(Echo), Arc::clone(&board), stop.clone()));
        Self { port, board, stop, served }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    /// The beginning of a request that is let in.
    fn head(&self, line: &str) -> String {
        let port = self.port;
        format!(
            "{line} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n\
             Content-Type: application/json\r\nCookie: commsd_web_{port}={TOKEN}\r\n"
        )
    }

    async fn ask(&self, request: &str) -> String {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        rest(&mut stream).await
    }

    async fn listen(&self) -> TcpStream {
        let mut stream = self.connect().await;
        let request = format!("{}\r\n", self.head("GET /events"));
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }
}

/// What comes until the connection ends.
async fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    // One that is cut off ends as well.
    let _ended = timeout(HANG, stream.read_to_end(&mut answer)).await.expect("it hangs");
    String::from_utf8(answer).unwrap()
}

/// Reads until `wanted` has come.
async fn until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut came = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&came).contains(wanted) {
            assert!(stream.read_buf(&mut came).await.unwrap() > 0, "the end, before {wanted}");
        }
    };
    timeout(HANG, read).await.expect("it does not come");
    String::from_utf8(came).unwrap()
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default()
}

#[tokio::test]
async fn files_calls_and_nothing_else() {
    let page = Page::serve(PageLimits::default());
    let get = page.ask(&format!("{}\r\n", page.head("GET /"))).await;
    assert!(get.starts_with("HTTP/1.1 200") && get.ends_with("\r\n\r\n<p>hello"), "{get}");
    let post = format!("{}Content-Length: 2\r\n\r\n{{}}", page.head("POST /api"));
    let post = page.ask(&post).await;
    assert!(post.starts_with("HTTP/1.1 200") && post.ends_with("\r\n\r\n{}"), "{post}");
    for (line, wanted) in [
        ("GET /api", 405),
        ("PUT /api", 405),
        ("POST /events", 405),
        ("POST /", 405),
        ("HEAD /", 405),
        ("OPTIONS /api", 405),
        ("GET /page", 404),
        ("GET //", 404),
        ("GET /../src/web.rs", 404),
    ] {
        let answer = page.ask(&format!("{}\r\n", page.head(line))).await;
        assert_eq!(status(&answer), wanted, "{line}: {answer}");
    }
}

#[tokio::test]
async fn every_answer_forbids_what_the_page_does_not_need() {
    let page = Page::serve(PageLimits::default());
    let refused = "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned();
    for request in [format!("{}\r\n", page.head("GET /")), refused] {
        let answer = page.ask(&request).await.to_lowercase();
        for header in [
            "cache-control: no-store",
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; \
             connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; ",
            "referrer-policy: no-referrer",
            "x-content-type-options: nosniff",
            "cross-origin-opener-policy: same-origin",
            "cross-origin-resource-policy: same-origin",
            "connection: close",
        ] {
            assert!(answer.contains(header), "{header}: {answer}");
        }
        assert!(!answer.contains("access-control"), "{answer}");
    }
}

#[tokio::test]
async fn silent_strangers_keep_nobody_out() {
    let page = Page::serve(PageLimits { newcomers: 4, ..PageLimits::default() });
    let mut silent = Vec::new();
    for n in 0..12 {
        let mut stream = page.connect().await;
        // Some say half of what they have to.
        if n % 2 == 0 {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: 127").await.unwrap();
        }
        silent.push(stream);
    }
    let get = format!("{}\r\n", page.head("GET /"));
    assert_eq!(status(&page.ask(&get).await), 200);
    // The oldest have made room, long before a head may take too long.
    assert_eq!(rest(&mut silent[0]).await, "");
    assert_eq!(rest(&mut silent[1]).await, "");
}

#[tokio::test]
async fn a_head_that_does_not_end_is_not_waited_for() {
    let limits = PageLimits { head: Duration::from_millis(50), ..PageLimits::default() };
    let page = Page::serve(limits);
    let mut slow = page.connect().await;
    slow.write_all(b"GET / HTTP/1.1\r\nHost: 127").await.unwrap();
    assert_eq!(rest(&mut slow).await, "");
    let long = format!("{}X: {}\r\n\r\n", page.head("GET /"), "x".repeat(2 * MAX_HEAD));
    assert_eq!(status(&page.ask(&long).await), 431);
}

#[tokio::test]
async fn bodies_have_bounds_of_bytes_and_time() {
    let limits =
        PageLimits { body: Duration::from_millis(200), body_bytes: 1000, ..PageLimits::default() };
    let page = Page::serve(limits);
    let head = page.head("POST /api");
    let whole = format!("{head}Content-Length: 1000\r\n\r\n{}", "x".repeat(1000));
    assert!(page.ask(&whole).await.ends_with(&"x".repeat(1000)));
    // Refused before it has come.
    assert_eq!(status(&page.ask(&format!("{head}Content-Length: 1001\r\n\r\n")).await), 413);
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n3e9\r\n{}", "x".repeat(1001));
    assert_eq!(status(&page.ask(&chunked).await), 413);
    let slow = format!("{head}Content-Length: 1000\r\n\r\nx");
    assert_eq!(status(&page.ask(&slow).await), 408);
    let mut cut = page.connect().await;
    cut.write_all(slow.as_bytes()).await.unwrap();
    cut.shutdown().await.unwrap();
    assert_eq!(status(&rest(&mut cut).await), 400);
}

#[tokio::test]
async fn a_listener_is_told_the_state_and_then_what_happens() {
    let page = Page::serve(PageLimits::default());
    let (mut one, mut two) = (page.listen().await, page.listen().await);
    for stream in [&mut one, &mut two] {
        let first = until(stream, "event: state\ndata: {\"here\":true}\n\n").await;
        assert!(first.contains("content-type: text/event-stream\r\n"), "{first}");
    }
    page.board.tell("event", "{\"seq\":1}");
    for stream in [&mut one, &mut two] {
        until(stream, "event: event\ndata: {\"seq\":1}\n\n").await;
    }
    page.board.tell("event", &"9".repeat(MAX_NEWS + 1));
    page.board.tell("event", "{\"seq\":2}");
    let came = until(&mut one, "{\"seq\":2}").await;
    assert!(came.contains("event: missed\n") && !came.contains("99999"), "{came}");
    page.stop.cancel();
    timeout(HANG, page.served).await.unwrap().unwrap();
    until(&mut two, "{\"seq\":2}").await;
    rest(&mut two).await;
}

#[tokio::test]
async fn who_does_not_read_loses_its_connection_and_nobody_else_waits() {
    let limits = PageLimits {
        listeners: 2,
        write_stall: Duration::from_millis(50),
        ..PageLimits::default()
    };
    let page = Page::serve(limits);
    let mut deaf = page.listen().await;
    until(&mut deaf, "event: state").await;
    let mut reader = page.listen().await;
    until(&mut reader, "event: state").await;
    let full = page.ask(&format!("{}\r\n", page.head("GET /events"))).await;
    assert_eq!(status(&full), 503, "{full}");
    // More than the system holds for one that does not read; the other has each.
    let long = format!("\"{}\"", "y".repeat(MAX_NEWS - 2));
    for n in 0..2000 {
        page.board.tell("event", &long);
        page.board.tell("event", &n.to_string());
        until(&mut reader, &format!("data: {n}\n\n")).await;
    }
    // Its place is free again.
    let again = async {
        loop {
            let mut stream = page.listen().await;
            if until(&mut stream, "\r\n\r\n").await.starts_with("HTTP/1.1 200") {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(HANG, again).await.expect("the place stays taken");
    let mut left = Vec::new();
    let end = timeout(HANG, deaf.read_to_end(&mut left)).await.expect("it is kept");
    assert!(end.is_err() || left.len() < 2000 * MAX_NEWS, "it has got everything");
}

#[tokio::test]
async fn a_slow_listener_is_told_that_it_missed_something() {
    let board = Board::default();
    let told = board.0.subscribe();
    for n in 0..=KEPT_NEWS {
        board.tell("event", &n.to_string());
    }
    let places = Arc::new(Semaphore::new(1));
    let place = places.try_acquire_owned().unwrap();
    let stream = listen(Bytes::from_static(b"first"), told, place);
    let mut stream = std::pin::pin!(stream);
    let mut came = Vec::new();
    for _ in 0..3 {
        let frame = futures_util::StreamExt::next(&mut stream).await.unwrap().unwrap();
        came.push(frame.into_data().unwrap());
    }
    assert_eq!(came, [Bytes::from_static(b"first"), missed(), news("event", "1")]);
}
