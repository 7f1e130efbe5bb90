//! An object store over HTTP: a small server that keeps objects in memory and knows conditional
//! creation, ranges, listings in pages and removal in bulk.
#![cfg(feature = "s3")]

mod common;

use common::{Image, info, key, settings};
use dray_backup::{
    GcOptions, Kind, Level, PIECE_BYTES, Policy, Put, Repository, S3Access, S3Store, Store,
    WriterOptions,
};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// Objects that one answer to a listing names, so that listings have several pages.
const PAGE: usize = 3;

struct Server {
    objects: Objects,
    address: String,
}

/// What the server does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Good,
    Overwrites,
    Forbids,
}

fn serve(manner: Manner) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let objects = Objects::default();
    let shared = objects.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let objects = shared.clone();
            std::thread::spawn(move || while answer(&stream, &objects, manner).is_some() {});
        }
    });
    Server { objects, address }
}

impl Server {
    fn store(&self, prefix: &str) -> S3Store {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials");
        std::fs::write(&file, "aws_access_key_id=id\naws_secret_access_key=secret\n").unwrap();
        let access = S3Access {
            endpoint: Some(self.address.clone()),
            credentials_file: Some(file),
            allow_http: true,
            ..S3Access::default()
        };
        S3Store::open("vms", prefix, &access).unwrap()
    }
}

struct Request {
    method: String,
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|len| *len > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let len = headers.get("content-length").map_or(0, |len| len.parse().unwrap());
    let mut body = vec![0; len];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Some(Request { method, path: path.to_owned(), query: query.to_owned(), headers, body })
}

fn answer(mut stream: &TcpStream, objects: &Objects, manner: Manner) -> Option<()> {
    let request = read_request(stream)?;
    let (status, head, body) = respond(&request, &mut objects.lock().unwrap(), manner);
    let len = if request.method == "HEAD" { head } else { body.len() };
    let date = "Wed, 21 Oct 2015 07:28:00 GMT";
    write!(
        stream,
        "HTTP/1.1 {status} X\r\ncontent-length: {len}\r\nlast-modified: {date}\r\netag: \"1\"\r\n{}\r\n",
        range_header(&request, head, status)
    )
    .ok()?;
    if request.method != "HEAD" {
        stream.write_all(&body).ok()?;
    }
    Some(())
}

fn range(request: &Request, len: usize) -> Option<(usize, usize)> {
    let (start, end) = request.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
    let start: usize = start.parse().unwrap();
    Some((start, end.parse::<usize>().unwrap().min(len.saturating_sub(1))))
}

fn range_header(request: &Request, len: usize, status: u16) -> String {
    match range(request, len) {
        Some((start, end)) if status == 206 => {
            format!("content-range: bytes {start}-{end}/{len}\r\n")
        }
        _ => String::new(),
    }
}

/// Status, length of the object, body.
fn respond(
    request: &Request,
    objects: &mut BTreeMap<String, Vec<u8>>,
    manner: Manner,
) -> (u16, usize, Vec<u8>) {
    let none = |status| (status, 0, Vec::new());
    if manner == Manner::Forbids {
        return none(403);
    }
    let name = request.path.trim_start_matches("/vms").trim_start_matches('/').to_owned();
    match request.method.as_str() {
        "PUT" => {
            let only_new = request.headers.get("if-none-match").is_some_and(|value| value == "*");
            if only_new && objects.contains_key(&name) && manner != Manner::Overwrites {
                return none(412);
            }
            objects.insert(name, request.body.clone());
            none(200)
        }
        "GET" if request.query.contains("list-type=2") => {
            let body = list(&request.query, objects).into_bytes();
            (200, 0, body)
        }
        "GET" | "HEAD" => match objects.get(&name) {
            None => none(404),
            Some(bytes) => match range(request, bytes.len()) {
                Some((start, _)) if start >= bytes.len() => none(416),
                Some((start, end)) => (206, bytes.len(), bytes[start..=end].to_vec()),
                None => (200, bytes.len(), bytes.clone()),
            },
        },
        "DELETE" => {
            objects.remove(&name);
            none(204)
        }
        "POST" => {
            let body = String::from_utf8_lossy(&request.body).into_owned();
            let keys = body.split("<Key>").skip(1).filter_map(|rest| rest.split('<').next());
            let mut text = String::from("<DeleteResult>");
            for key in keys {
                objects.remove(key);
                text += &format!("<Deleted><Key>{key}</Key></Deleted>");
            }
            (200, 0, (text + "</DeleteResult>").into_bytes())
        }
        _ => none(405),
    }
}

fn list(query: &str, objects: &BTreeMap<String, Vec<u8>>) -> String {
    let value = |wanted: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let found = pairs.find(|(name, _)| *name == wanted).map(|(_, value)| value);
        found.unwrap_or("").replace("%2F", "/")
    };
    let (prefix, after) = (value("prefix"), value("continuation-token"));
    let all = objects.iter().filter(|(name, _)| name.starts_with(&prefix) && **name > after);
    let all: Vec<_> = all.collect();
    let mut text = String::from("<ListBucketResult>");
    for (name, bytes) in all.iter().take(PAGE) {
        text += &format!(
            "<Contents><Key>{name}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>\
             <ETag>\"1\"</ETag><Size>{}</Size></Contents>",
            bytes.len()
        );
    }
    if all.len() > PAGE {
        text += &format!("<NextContinuationToken>{}</NextContinuationToken>", all[PAGE - 1].0);
    }
    text + &format!("<IsTruncated>{}</IsTruncated></ListBucketResult>", all.len() > PAGE)
}

#[test]
fn a_bucket_keeps_the_promises_of_a_store() {
    let server = serve(Manner::Good);
    let store = server.store("some/where");
    assert_eq!(store.put_new("a/1", b"one").unwrap(), Put::Created);
    assert_eq!(store.put_new("a/1", b"two").unwrap(), Put::Existed);
    assert_eq!(store.put_new("empty", b"").unwrap(), Put::Created);
    assert_eq!(store.get("a/1", 3).unwrap(), b"one");
    assert_eq!(store.get("a/1", 2).unwrap_err().kind(), Kind::Damaged);
    assert_eq!(store.get("empty", 5).unwrap(), b"");
    assert_eq!(store.get_range("a/1", 1, 2).unwrap(), b"ne");
    assert_eq!(store.get_range("a/1", 1, 3).unwrap_err().kind(), Kind::Damaged);
    assert_eq!(store.get_range("a/1", 7, 3).unwrap_err().kind(), Kind::Damaged);
    assert_eq!(store.get("b", 3).unwrap_err().kind(), Kind::NotFound);
    assert!(store.exists("a/1").unwrap() && !store.exists("b").unwrap());
    for n in 2..9 {
        store.put_new(&format!("a/{n}"), b"x").unwrap();
    }
    let listed = store.list("a/").unwrap();
    assert_eq!(listed.len(), 8, "more than a page");
    assert!(listed[0].age > Duration::ZERO && listed[0].name == "a/1" && listed[0].bytes == 3);
    assert_eq!(store.list("").unwrap().len(), 9);
    store.delete("a/1").unwrap();
    store.delete("a/1").unwrap();
    assert!(!store.exists("a/1").unwrap());
    assert!(server.objects.lock().unwrap().keys().all(|name| name.starts_with("some/where/")));
}

#[test]
fn backups_live_in_a_bucket() {
    let server = serve(Manner::Good);
    let store = Arc::new(server.store(""));
    let repository = Repository::create_with(store, &key(true), settings(300_000)).unwrap();
    let mut image = Image::new(1, 30 * PIECE_BYTES as u64 + 5);
    (0..20).for_each(|ix| image.write(ix, 3 + ix as u8));
    let mut parent = None;
    for content in [4, 9] {
        image.write(2, content);
        let manifest = parent.as_ref().map(|backup| repository.manifest(backup).unwrap());
        let options = WriterOptions::default();
        let mut writer =
            repository.writer(image.id, image.bytes, manifest.as_ref(), options).unwrap();
        (0..20).for_each(|ix| writer.put(ix, &image.piece(ix)).unwrap());
        parent = Some(writer.finish(info(&image)).unwrap());
    }
    image.check(&repository, parent.as_ref().unwrap());
    let policy = Policy { last: 1, ..Policy::default() };
    assert_eq!(repository.prune(None, policy, false).unwrap().removed.len(), 1);
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    assert!(repository.gc(options).unwrap().removed_packs > 0);
    assert!(repository.verify(Level::Everything).unwrap().problems.is_empty());
    image.check(&repository, parent.as_ref().unwrap());
}

#[test]
fn a_store_that_overwrites_or_forbids_is_refused() {
    let create = |manner| {
        let store = Arc::new(serve(manner).store(""));
        Repository::create(store, &key(false)).unwrap_err().kind()
    };
    assert_eq!(create(Manner::Overwrites), Kind::Unsupported);
    assert_eq!(create(Manner::Forbids), Kind::Denied);
}
