//! Hellos that are too new, too old, too slow, or no hellos at all.

use crate::lab::{Lab, hello, serve};
use dray_net::{DialSettings, ListenSettings, NetErrorKind, dial};
use dray_types::{ErrorKind, Refusal};
use dray_wire::hello::{PREFACE_LEN, decode_preface};
use dray_wire::{HelloReply, StreamKind};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a listener answers to these bytes inside good TLS.
async fn answer_to(bytes: &[u8]) -> HelloReply {
    let lab = Lab::new();
    let (address, _accepted) = lab.listen().await;
    let mut tls = lab.raw(address).await;
    tls.write_all(bytes).await.unwrap();
    let mut fixed = [0; PREFACE_LEN];
    tls.read_exact(&mut fixed).await.unwrap();
    let mut body = vec![0; decode_preface(&fixed).unwrap().body_len];
    tls.read_exact(&mut body).await.unwrap();
    assert_eq!(tls.read(&mut [0]).await.unwrap(), 0, "the stream is closed in order");
    HelloReply::decode(&body).unwrap()
}

async fn refusal_of(bytes: &[u8]) -> String {
    match answer_to(bytes).await {
        HelloReply::Refused(why) => why.in_words(),
        welcome => panic!("{welcome:?}"),
    }
}

#[tokio::test]
async fn other_versions_are_refused_with_both_ranges() {
    let mut bytes = hello().encode(StreamKind::Control);
    bytes[4..8].copy_from_slice(&[9, 0, 12, 0]);
    let why = refusal_of(&bytes).await;
    assert!(why.contains("the peer speaks 9 to 12, this agent 1 to 1"), "{why}");
    bytes[4..8].copy_from_slice(&[0, 0, 0, 0]);
    let why = refusal_of(&bytes).await;
    assert!(why.contains("the peer speaks 0 to 0") && why.contains("upgrade"), "{why}");
}

#[tokio::test]
async fn what_is_no_hello_is_refused() {
    let why = refusal_of(b"GET / HTTP/1.1\r\n\r\n").await;
    assert!(why.contains("does not speak dray's protocol"), "{why}");
    let mut bytes = hello().encode(StreamKind::Control);
    bytes[8] = 77;
    assert!(refusal_of(&bytes).await.contains("stream kind 77"));
    let mut bytes = hello().encode(StreamKind::Control);
    bytes[10..12].copy_from_slice(&[0xff, 0xff]);
    assert!(refusal_of(&bytes).await.contains("over the limit of 4096"));
    let mut bytes = hello().encode(StreamKind::Control);
    bytes[PREFACE_LEN..].fill(0xff);
    assert!(refusal_of(&bytes).await.contains("does not decode"));
}

#[tokio::test]
async fn a_refusal_by_the_agent_reaches_the_dialler() {
    let lab = Lab::new();
    let address = serve(&lab.hostb, ListenSettings::default(), |incoming| async move {
        let long = "x".repeat(5000);
        let why = Refusal::new(ErrorKind::NoSpace, "cannot", format!("pool full {long}"));
        incoming.refuse(why.hint(long)).await;
    })
    .await;
    let error = lab.dial(address, StreamKind::Data).await.unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Refused(ErrorKind::NoSpace));
    assert!(error.what.contains("pool full xxx") && error.what.len() < 1100, "{error}");
}

#[tokio::test]
async fn silence_ends_with_a_timeout_on_both_sides() {
    let lab = Lab::new();
    let short = Duration::from_millis(300);
    let settings = ListenSettings { handshakes: 9, of_address: 9, handshake: short };
    let address = serve(&lab.hostb, settings, |incoming| async move {
        let _ = incoming.welcome(Vec::new()).await;
    })
    .await;
    let began = Instant::now();
    let mut silent = TcpStream::connect(address).await.unwrap();
    assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
    assert!(began.elapsed() >= short, "{:?}", began.elapsed());
    // Bytes that drip in do not make it longer: else it would last for as long as they do, some minutes. They are the
    // start of the longest TLS record.
    let (mut hear, mut say) = TcpStream::connect(address).await.unwrap().into_split();
    let drip = tokio::spawn(async move {
        for byte in [22u8, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat(1)) {
            tokio::time::sleep(Duration::from_millis(30)).await;
            if say.write_all(&[byte]).await.is_err() {
                break;
            }
        }
    });
    let ended = tokio::time::timeout(Duration::from_secs(60), hear.read(&mut [0])).await;
    assert!(ended.is_ok(), "a client that drips is waited for");
    drip.abort();

    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = mute.local_addr().unwrap().to_string();
    let settings = DialSettings { handshake: short, ..DialSettings::default() };
    let kind = StreamKind::Control;
    let error = dial(&lab.hosta, "hostb", &address, kind, &hello(), &settings).await.unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Timeout, "{error}");
}

#[tokio::test]
async fn who_says_nothing_goes_when_others_come() {
    let lab = Lab::new();
    let handshake = Duration::from_secs(60);
    let settings = ListenSettings { handshakes: 3, of_address: 3, handshake };
    let address = serve(&lab.hostb, settings, |incoming| async move {
        let _ = incoming.welcome(Vec::new()).await;
    })
    .await;
    let from = |last: u8| async move {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, last], 0).into()).unwrap();
        socket.connect(address).await.unwrap()
    };
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(from(2).await);
    }
    // Its address has no place left, also not for one that would say something.
    assert!(matches!(from(2).await.read(&mut [0]).await, Ok(0) | Err(_)));
    let began = Instant::now();
    lab.dial(address, StreamKind::Control).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(matches!(silent[0].read(&mut [0]).await, Ok(0) | Err(_)), "the oldest has gone");
}

#[tokio::test]
async fn an_agent_that_is_something_else_is_said_so() {
    let lab = Lab::new();
    let web = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = web.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut tcp, _) = web.accept().await.unwrap();
        tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        let _ = tcp.read(&mut [0; 512]).await;
    });
    let error = lab.dial(address, StreamKind::Control).await.unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Protocol);
    assert!(error.to_string().contains("hostb does not speak TLS"), "{error}");
}
