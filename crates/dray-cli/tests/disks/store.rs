//! An S3 server that nobody here wrote, which `ci/s3.sh` installs, behind a door that can be shut.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Where the server's command is.
const VARIABLE: &str = "DRAY_S3_SERVER";
/// How long a door is shut before one who waits there looks whether it has opened.
const LOOK: Duration = Duration::from_millis(50);

/// How the door is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Door {
    /// Everything passes.
    Open,
    /// Every request is answered with 503.
    Busy,
    /// Nothing is answered.
    Silent,
}

/// A bucket `vms` in a server of its own.
pub struct Bucket {
    server: Child,
    behind: SocketAddr,
    door: Arc<AtomicU8>,
    /// What the agents are told.
    pub endpoint: String,
}

impl Bucket {
    /// Starts it; nothing where no server is installed.
    pub fn start() -> Option<Self> {
        let server = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
        let Some(command) = server.filter(|_| cfg!(feature = "s3")) else {
            println!(
                "SKIP: built without the feature s3, or {VARIABLE} names no server: `make s3`"
            );
            return None;
        };
        let mut server = Command::new(command)
            .args(["-H", "127.0.0.1", "-p", "0"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(server.stderr.take().unwrap());
        let behind = loop {
            let mut line = String::new();
            assert!(told.read_line(&mut line).unwrap() > 0, "the server ended");
            if let Some((_, address)) = line.trim_end().split_once("http://") {
                break address.parse().unwrap();
            }
        };
        // It says something of every request, and stops when nobody listens.
        std::thread::spawn(move || std::io::copy(&mut told, &mut std::io::sink()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let door = Arc::new(AtomicU8::new(Door::Open as u8));
        let ours = Arc::clone(&door);
        std::thread::spawn(move || {
            for guest in listener.incoming().flatten() {
                let door = Arc::clone(&ours);
                std::thread::spawn(move || let_in(guest, behind, &door));
            }
        });
        let bucket = Self { server, behind, door, endpoint };
        assert!(bucket.request("PUT", "/vms", "").contains(" 200 "), "no bucket");
        Some(bucket)
    }

    /// The door from now on, for connections that exist as well.
    pub fn set(&self, door: Door) {
        self.door.store(door as u8, Ordering::SeqCst);
    }

    /// From now on the server wants to know who asks, and knows nobody.
    pub fn forget_all_accounts(&self) {
        let told = self.request("POST", "/moto-api/reset-auth", "0");
        assert!(told.contains(" 200 "), "{told}");
    }

    /// The repository in a host's configuration; the file with its credentials is made in `folder`.
    pub fn place(&self, name: &str, folder: &Path) -> String {
        let file: PathBuf = folder.join("credentials");
        let keys = "[default]\naws_access_key_id = AKIATEST\naws_secret_access_key = not/secret\n";
        std::fs::write(&file, keys).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        format!(
            "[[backup]]\nname = \"{name}\"\nurl = \"s3://vms/team1\"\nendpoint = \"{}\"\n\
             allow_http = true\ncredentials_file = \"{}\"\n",
            self.endpoint,
            file.display()
        )
    }

    /// Asks the server itself.
    fn request(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(self.behind).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            self.behind,
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// One connection, both ways, as long as the door is open.
fn let_in(mut guest: TcpStream, behind: SocketAddr, door: &Arc<AtomicU8>) {
    let mut server = TcpStream::connect(behind).unwrap();
    let (mut from, mut to) = (server.try_clone().unwrap(), guest.try_clone().unwrap());
    let answers = std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut bytes = [0; 1 << 16];
    while let Ok(read @ 1..) = guest.read(&mut bytes) {
        while door.load(Ordering::SeqCst) == Door::Silent as u8 {
            std::thread::sleep(LOOK);
        }
        if door.load(Ordering::SeqCst) == Door::Busy as u8 {
            let _ = guest.write_all(
                b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            );
            break;
        }
        if server.write_all(&bytes[..read]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
    let _ = guest.shutdown(Shutdown::Both);
    let _ = answers.join();
}
