//! NBD over TLS, spoken by hand.

use crate::lab::Lab;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

const OPTION: u64 = 0x4948_4156_454F_5054;
/// Options of the protocol.
const LIST: u32 = 3;
const STARTTLS: u32 = 5;
const GO: u32 = 7;
/// Kinds of replies.
const ACK: u32 = 1;
const SERVER: u32 = 2;
const INFO: u32 = 3;

/// A client after its TLS handshake.
pub struct Remote(StreamOwned<ClientConnection, TcpStream>);

fn take<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).map(|()| bytes)
}

fn say(to: &mut impl Write, option: u32, payload: &[u8]) -> io::Result<()> {
    let head = [&OPTION.to_be_bytes()[..], &option.to_be_bytes()].concat();
    to.write_all(&[&head[..], &(payload.len() as u32).to_be_bytes(), payload].concat())?;
    to.flush()
}

/// One reply: its kind and payload.
fn hear(from: &mut impl Read) -> io::Result<(u32, Vec<u8>)> {
    let _magic_and_option: [u8; 12] = take(from)?;
    let kind = u32::from_be_bytes(take(from)?);
    let mut payload = vec![0; u32::from_be_bytes(take(from)?) as usize];
    from.read_exact(&mut payload).map(|()| (kind, payload))
}

/// A connection on which TLS may begin.
pub fn before_tls(address: &str) -> io::Result<TcpStream> {
    let mut tcp = TcpStream::connect(address)?;
    tcp.set_read_timeout(Some(Duration::from_secs(60)))?;
    let _greeting: [u8; 18] = take(&mut tcp)?;
    tcp.write_all(&3u32.to_be_bytes())?;
    say(&mut tcp, STARTTLS, &[])?;
    assert_eq!(hear(&mut tcp)?.0, ACK);
    Ok(tcp)
}

impl Remote {
    /// With the certificate of `name`.
    pub fn connect(lab: &Lab, name: &str, address: &str) -> io::Result<Self> {
        let dir = lab.dir.path().join("pki").join(name);
        let certs = |file: &str| -> Vec<CertificateDer<'static>> {
            let all = CertificateDer::pem_file_iter(dir.join(file)).unwrap();
            all.map(Result::unwrap).collect()
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certs("ca-cert.pem"));
        let key = PrivateKeyDer::from_pem_file(dir.join("client-key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(certs("client-cert.pem"), key)
            .unwrap();
        let server = ServerName::try_from("hosta").unwrap();
        let session = ClientConnection::new(Arc::new(config), server).unwrap();
        let mut stream = StreamOwned::new(session, before_tls(address)?);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        Ok(Self(stream))
    }

    /// The exports that it is shown.
    pub fn list(&mut self) -> io::Result<Vec<String>> {
        say(&mut self.0, LIST, &[])?;
        let mut names = Vec::new();
        loop {
            match hear(&mut self.0)? {
                (SERVER, item) => {
                    let len = u32::from_be_bytes(item[..4].try_into().unwrap()) as usize;
                    names.push(String::from_utf8(item[4..4 + len].to_vec()).unwrap());
                }
                (ACK, _) => return Ok(names),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Opens an export, if it may: whether it can only be read.
    pub fn go(&mut self, name: &str) -> io::Result<Result<bool, String>> {
        let len = (name.len() as u32).to_be_bytes();
        say(&mut self.0, GO, &[&len[..], name.as_bytes(), &[0, 0]].concat())?;
        let mut read_only = false;
        loop {
            match hear(&mut self.0)? {
                (INFO, item) if item[..2] == [0, 0] => read_only = item[11] & 2 != 0,
                (INFO, _) => {}
                (ACK, _) => return Ok(Ok(read_only)),
                (_, why) => return Ok(Err(String::from_utf8(why).unwrap())),
            }
        }
    }

    /// Writes zeros to the first block; the error that the server answers.
    pub fn write(&mut self) -> io::Result<u32> {
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1];
        request.extend([0; 16]);
        request.extend(4096u32.to_be_bytes());
        request.extend([0; 4096]);
        self.0.write_all(&request)?;
        self.0.flush()?;
        let answer: [u8; 16] = take(&mut self.0)?;
        Ok(u32::from_be_bytes(answer[4..8].try_into().unwrap()))
    }
}
