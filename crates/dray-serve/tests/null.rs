//! A whole front end without a protocol: its clients are calls.

use dray_image::{
    Attempt, Departure, Error, ErrorKind, Extent, ExtentKind, Geometry, Image, ZeroMode,
};
use dray_serve::{
    Attachment, Attachments, Client, ClientLink, Closed, Door, ExportError, ExportInfo, Exports,
    Flushed, FrontEnd, Job, Session, Workers,
};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

const LEN: usize = 64 << 10;
const TIME: Duration = Duration::from_secs(10);

/// A request that may have to wait.
enum Request {
    Read { offset: u64, len: usize },
    Write { offset: u64, data: Vec<u8> },
}

type Answer = Result<Vec<u8>, ErrorKind>;

/// One client's use of the image.
struct Use {
    image: Arc<dyn Image>,
    client: Arc<dray_image::Client>,
    closing: Arc<AtomicBool>,
    answers: Sender<Answer>,
}

impl Session for Use {
    type Job = Request;

    fn image(&self) -> &dyn Image {
        &*self.image
    }

    fn client(&self) -> &Arc<dray_image::Client> {
        &self.client
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn flushed(&self, _: u64, outcome: Flushed<'_>) {
        let outcome = outcome.map(|outcome| outcome.map_err(|why| why.kind));
        let outcome = outcome.unwrap_or(Err(ErrorKind::Io));
        let _ = self.answers.send(outcome.map(|()| Vec::new()));
    }
}

impl Job<Use> for Request {
    type Outlet = ();

    fn cost(&self) -> u64 {
        match self {
            Self::Read { len, .. } => *len as u64,
            Self::Write { data, .. } => data.len() as u64,
        }
    }

    fn changes(&self) -> bool {
        matches!(self, Self::Write { .. })
    }

    fn outlet(&self) {}

    fn run(self, session: &Use) {
        let outcome = match self {
            Self::Read { offset, len } => {
                let mut data = vec![0; len];
                session.image.read_at(&mut data, offset).map(|()| data)
            }
            Self::Write { offset, data } => {
                session.image.write_at(&data, offset, false).map(|()| Vec::new())
            }
        };
        let _ = session.answers.send(outcome.map_err(|why| why.kind));
    }

    fn panicked((): (), session: &Use) {
        let _ = session.answers.send(Err(ErrorKind::Io));
    }
}

/// A client that is attached.
struct Connection {
    session: Arc<Use>,
    workers: Workers<Use>,
    attachment: Attachment,
    answers: Receiver<Answer>,
}

impl Connection {
    fn read(&self, offset: u64, len: usize) -> Answer {
        let mut data = vec![0; len];
        match self.session.image.try_read_at(&mut data, offset) {
            Ok(Attempt::Done) => return Ok(data),
            Ok(Attempt::WouldWait) => {}
            Err(why) => return Err(why.kind),
        }
        self.later(Request::Read { offset, len })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Answer {
        self.session.client.writes();
        self.later(Request::Write { offset, data: data.to_vec() })
    }

    fn later(&self, request: Request) -> Answer {
        self.workers.submit(request).expect("a worker");
        self.answers.recv_timeout(TIME).expect("an answer")
    }

    fn flush(&self) -> Answer {
        self.workers.flush(0).expect("a thread for flushes");
        self.answers.recv_timeout(TIME).expect("an answer")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.workers.abandon();
        self.session.client.departs(Departure::Goodbye);
        self.session.image.look_at(&self.session.client);
        self.attachment.ends(self.workers.are_changing());
        self.workers.drain();
    }
}

/// The front end.
struct Null {
    attachments: Arc<Attachments>,
    shut: AtomicBool,
    lines: Mutex<Vec<Weak<AtomicBool>>>,
}

impl Null {
    fn connect(&self, name: &str) -> Result<Connection, String> {
        let closing = Arc::new(AtomicBool::new(self.shut.load(Ordering::Acquire)));
        let has_gone = Arc::new(|| false);
        let (client, cut) = (Client::default(), Arc::new(|| ()));
        let line = ClientLink { client, closing: Arc::clone(&closing), has_gone, cut };
        self.lines.lock().push(Arc::downgrade(&closing));
        let pause = |time| self.attachments.pause(time, &line);
        let mut door = Door::new(self.attachments.exports(), line.client, TIME, &pause);
        let image = door.open(name).map_err(|closed| match closed {
            Closed::Refused(why) => why.to_string(),
            Closed::Cut => "cut".to_owned(),
        })?;
        let attachment = self.attachments.attach(name, &line, TIME).ok_or("cut")?;
        let client = dray_image::Client::new(Arc::new(|| true));
        image.look_at(&client);
        let (answers, receiver) = channel();
        let session = Arc::new(Use { image, client, closing, answers });
        let workers = Workers::new(Arc::clone(&session), self.attachments.share(name));
        Ok(Connection { session, workers, attachment, answers: receiver })
    }
}

impl FrontEnd for Null {
    fn shut(&self, _: Duration) -> usize {
        self.shut.store(true, Ordering::Release);
        let lines = self.lines.lock();
        let open: Vec<_> = lines.iter().filter_map(Weak::upgrade).collect();
        open.iter().for_each(|closing| closing.store(true, Ordering::Release));
        self.attachments.wake();
        open.len()
    }
}

/// An image in memory that lets everything wait.
struct Memory(Mutex<Vec<u8>>);

impl Image for Memory {
    fn geometry(&self) -> Geometry {
        Geometry { len: LEN as u64, min_block: 1, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> dray_image::Result<()> {
        let data = self.0.lock();
        let range = offset as usize..offset as usize + buf.len();
        buf.copy_from_slice(data.get(range).ok_or_else(outside)?);
        Ok(())
    }

    fn write_at(&self, new: &[u8], offset: u64, _: bool) -> dray_image::Result<()> {
        let mut data = self.0.lock();
        let range = offset as usize..offset as usize + new.len();
        data.get_mut(range).ok_or_else(outside)?.copy_from_slice(new);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, _: ZeroMode, fua: bool) -> dray_image::Result<()> {
        self.write_at(&vec![0; len as usize], offset, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> dray_image::Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> dray_image::Result<()> {
        Ok(())
    }

    fn sync(&self) -> dray_image::Result<()> {
        Ok(())
    }

    fn extents(&self, _: u64, len: u64, _: usize) -> dray_image::Result<Vec<Extent>> {
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }
}

fn outside() -> Error {
    Error::new(ErrorKind::OutOfRange, "cannot use the image", "the request leaves it")
}

/// One export, and who was told of coming and going.
struct One {
    image: Arc<dyn Image>,
    attached: AtomicUsize,
}

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo::new("disk")]
    }

    fn open(&self, name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
        match name {
            "disk" => Ok(Arc::clone(&self.image)),
            _ => Err(ExportError::unknown(name)),
        }
    }

    fn attached(&self, _: &str, _: &Client, connections: usize) {
        self.attached.store(connections, Ordering::SeqCst);
    }

    fn detached(&self, _: &str, _: &Client, connections: usize) {
        self.attached.store(connections, Ordering::SeqCst);
    }
}

fn null() -> (Null, Arc<One>) {
    let image = Arc::new(Memory(Mutex::new(vec![0; LEN])));
    let one = Arc::new(One { image, attached: AtomicUsize::new(0) });
    let exports = Arc::clone(&one) as Arc<dyn Exports>;
    let attachments = Attachments::new(exports);
    (Null { attachments, shut: AtomicBool::new(false), lines: Mutex::default() }, one)
}

#[test]
fn a_client_reads_what_it_wrote_and_errors_are_its_own() {
    let (null, _) = null();
    let client = null.connect("disk").unwrap();
    assert_eq!(client.write(4096, b"written"), Ok(Vec::new()));
    assert_eq!(client.flush(), Ok(Vec::new()));
    assert_eq!(client.read(4096, 7), Ok(b"written".to_vec()));
    assert_eq!(client.read(LEN as u64, 1), Err(ErrorKind::OutOfRange));
    assert_eq!(client.read(4096, 7), Ok(b"written".to_vec()));
}

#[test]
fn clients_are_counted_with_those_of_other_front_ends() {
    let (null, one) = null();
    assert_eq!(null.connect("other").err().as_deref(), Some("no export named 'other'"));
    let (a, b) = (null.connect("disk").unwrap(), null.connect("disk").unwrap());
    assert_eq!((null.attachments.count("disk"), one.attached.load(Ordering::SeqCst)), (2, 2));
    drop((a, b));
    assert_eq!((null.attachments.count("disk"), one.attached.load(Ordering::SeqCst)), (0, 0));
}

#[test]
fn one_that_is_shut_lets_nobody_in() {
    let (null, _) = null();
    let client = null.connect("disk").unwrap();
    let ways: Vec<&dyn FrontEnd> = vec![&null];
    assert_eq!(ways[0].shut(TIME), 1);
    assert!(client.session.is_closing());
    assert_eq!(null.connect("disk").err().as_deref(), Some("cut"));
}
