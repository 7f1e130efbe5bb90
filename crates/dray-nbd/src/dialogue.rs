//! What the server says to each option. Pure but for asking at the `door` for exports: an option and
//! its payload in, reply bytes and the next step out.

use crate::limits::MAX_PAYLOAD;
use crate::option::{InfoRequest, Malformed, export_name, info_request, meta_request};
use crate::proto::{BASE_ALLOCATION, BASE_ALLOCATION_ID, export, info, opt, rep};
use crate::reply::{option_reply, shorten};
use crate::request::Rules;
use dray_image::{Geometry, Image};
use dray_serve::{Access, Closed, Door, ExportError, ExportInfo};
use std::sync::Arc;

/// What a negotiation ends with.
pub(crate) struct Agreed {
    pub name: String,
    pub image: Arc<dyn Image>,
    pub rules: Rules,
}

/// What happens after an option's replies have been sent.
pub(crate) enum Next {
    /// Wait for the next option.
    Option,
    /// Shake hands for TLS, then wait for the next option.
    StartTls,
    /// The client may send requests.
    Transmit(Box<Agreed>),
    /// Hang up.
    Close,
    /// Hang up without a word: what there is to say, the client shall not hear.
    Cut,
}

/// Whether TLS is there for this connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Secrecy {
    Off,
    Offered,
    Required,
    Active,
}

/// The state of one negotiation.
pub(crate) struct Dialogue<'a> {
    pub door: Door<'a>,
    pub secrecy: Secrecy,
    pub no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` was chosen.
    allocation_for: Option<String>,
    /// Replies to be sent.
    pub out: Vec<u8>,
}

impl<'a> Dialogue<'a> {
    pub(crate) fn new(door: Door<'a>, secrecy: Secrecy) -> Self {
        Self {
            door,
            secrecy,
            no_zeroes: false,
            structured: false,
            allocation_for: None,
            out: Vec::new(),
        }
    }

    /// Answers `option`.
    pub(crate) fn answer(&mut self, option: u32, payload: &[u8]) -> Next {
        if self.secrecy == Secrecy::Required && !matches!(option, opt::STARTTLS | opt::ABORT) {
            return self.insist_on_tls(option);
        }
        match option {
            opt::EXPORT_NAME => self.export_name(payload),
            opt::ABORT => {
                self.reply(option, rep::ACK, &[]);
                Next::Close
            }
            opt::LIST => self.list(payload),
            opt::STARTTLS => self.start_tls(payload),
            opt::INFO | opt::GO => self.info_or_go(option, payload),
            opt::STRUCTURED_REPLY => self.structured_reply(payload),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => self.meta_context(option, payload),
            _ => self.refuse(option, rep::ERR_UNSUP, "option is not supported"),
        }
    }

    /// The TLS session is up: everything said before it is void.
    pub(crate) fn tls_is_active(&mut self) {
        self.secrecy = Secrecy::Active;
        self.structured = false;
        self.allocation_for = None;
    }

    /// Answers an option whose payload was too long to be read.
    pub(crate) fn too_big(&mut self, option: u32) {
        self.reply(option, rep::ERR_TOO_BIG, b"option is longer than 64 KiB");
    }

    fn reply(&mut self, option: u32, kind: u32, payload: &[u8]) {
        option_reply(&mut self.out, option, kind, payload);
    }

    fn refuse(&mut self, option: u32, kind: u32, why: &str) -> Next {
        self.reply(option, kind, shorten(why).as_bytes());
        Next::Option
    }

    fn malformed(&mut self, option: u32, fault: Malformed) -> Next {
        match fault {
            Malformed::Invalid(why) => self.refuse(option, rep::ERR_INVALID, why),
            Malformed::TooBig(why) => self.refuse(option, rep::ERR_TOO_BIG, why),
        }
    }

    fn no_such_export(&mut self, option: u32, closed: &Closed) -> Next {
        let Closed::Refused(error) = closed else { return Next::Cut };
        let kind = match error {
            ExportError::Unknown { .. } => rep::ERR_UNKNOWN,
            ExportError::Refused(_) | ExportError::NotYet(_) => rep::ERR_POLICY,
            ExportError::ShuttingDown(_) => rep::ERR_SHUTDOWN,
        };
        self.refuse(option, kind, &error.to_string())
    }

    fn insist_on_tls(&mut self, option: u32) -> Next {
        if option == opt::EXPORT_NAME {
            return Next::Close; // This option has no way to say no.
        }
        self.refuse(option, rep::ERR_TLS_REQD, "this server requires tls; start it first")
    }

    fn start_tls(&mut self, payload: &[u8]) -> Next {
        if !payload.is_empty() {
            return self.refuse(opt::STARTTLS, rep::ERR_INVALID, "starttls has no payload");
        }
        match self.secrecy {
            Secrecy::Off => self.refuse(opt::STARTTLS, rep::ERR_POLICY, "tls is not configured"),
            Secrecy::Active => self.refuse(opt::STARTTLS, rep::ERR_INVALID, "tls is active"),
            Secrecy::Offered | Secrecy::Required => {
                self.reply(opt::STARTTLS, rep::ACK, &[]);
                Next::StartTls
            }
        }
    }

    fn structured_reply(&mut self, payload: &[u8]) -> Next {
        if !payload.is_empty() {
            let why = "structured reply has no payload";
            return self.refuse(opt::STRUCTURED_REPLY, rep::ERR_INVALID, why);
        }
        self.structured = true;
        self.reply(opt::STRUCTURED_REPLY, rep::ACK, &[]);
        Next::Option
    }

    fn list(&mut self, payload: &[u8]) -> Next {
        if !payload.is_empty() {
            return self.refuse(opt::LIST, rep::ERR_INVALID, "list has no payload");
        }
        for ExportInfo { name, description, .. } in self.door.list() {
            let mut item = Vec::with_capacity(4 + name.len() + description.len());
            item.extend_from_slice(&(name.len() as u32).to_be_bytes());
            item.extend_from_slice(name.as_bytes());
            item.extend_from_slice(shorten(&description).as_bytes());
            self.reply(opt::LIST, rep::SERVER, &item);
        }
        self.reply(opt::LIST, rep::ACK, &[]);
        Next::Option
    }

    fn meta_context(&mut self, option: u32, payload: &[u8]) -> Next {
        let setting = option == opt::SET_META_CONTEXT;
        if setting {
            self.allocation_for = None; // Whatever becomes of this option, it replaces the last.
        }
        if !self.structured {
            let why = "metadata contexts need structured replies";
            return self.refuse(option, rep::ERR_INVALID, why);
        }
        let request = match meta_request(payload) {
            Ok(request) => request,
            Err(fault) => return self.malformed(option, fault),
        };
        if let Err(closed) = self.door.open(request.name) {
            return self.no_such_export(option, &closed);
        }
        let asked = |query: &&[u8]| {
            *query == BASE_ALLOCATION.as_bytes() || (!setting && *query == b"base:")
        };
        let all = !setting && request.queries.is_empty();
        if all || request.queries.iter().any(asked) {
            if setting {
                self.allocation_for = Some(request.name.to_owned());
            }
            let mut context = BASE_ALLOCATION_ID.to_be_bytes().to_vec();
            context.extend_from_slice(BASE_ALLOCATION.as_bytes());
            self.reply(option, rep::META_CONTEXT, &context);
        }
        self.reply(option, rep::ACK, &[]);
        Next::Option
    }

    fn agree(&self, name: &str, image: Arc<dyn Image>, about: &ExportInfo) -> Agreed {
        let geometry = image.geometry();
        let read_only = geometry.read_only || self.door.access(name) < Access::Write;
        let rules = Rules {
            len: geometry.len,
            min_block: min_block(&geometry),
            read_only,
            structured: self.structured,
            allocation: self.allocation_for.as_deref() == Some(name),
            fast_zero: about.fast_zero && !read_only,
        };
        Agreed { name: name.to_owned(), image, rules }
    }

    fn export_name(&mut self, payload: &[u8]) -> Next {
        // This old option can only succeed or hang up.
        let Ok(name) = export_name(payload) else { return Next::Close };
        let Ok(image) = self.door.open(name) else { return Next::Close };
        let agreed = self.agree(name, image, &self.door.exports.describe(name));
        self.out.extend_from_slice(&agreed.rules.len.to_be_bytes());
        self.out.extend_from_slice(&transmission_flags(&agreed.rules).to_be_bytes());
        if !self.no_zeroes {
            self.out.extend_from_slice(&[0; 124]);
        }
        Next::Transmit(Box::new(agreed))
    }

    fn info_or_go(&mut self, option: u32, payload: &[u8]) -> Next {
        let request = match info_request(payload) {
            Ok(request) => request,
            Err(fault) => return self.malformed(option, fault),
        };
        let image = match self.door.open(request.name) {
            Ok(image) => image,
            Err(closed) => return self.no_such_export(option, &closed),
        };
        let about = self.door.exports.describe(request.name);
        let geometry = image.geometry();
        let agreed = self.agree(request.name, image, &about);
        let told = request.items.contains(&info::BLOCK_SIZE);
        if option == opt::GO && agreed.rules.min_block > 1 && !told {
            let why = "this export has a minimum block size; ask for block size constraints";
            return self.refuse(option, rep::ERR_BLOCK_SIZE_REQD, why);
        }
        self.send_info(option, &request, &about, &geometry, &agreed.rules);
        self.reply(option, rep::ACK, &[]);
        if option == opt::GO { Next::Transmit(Box::new(agreed)) } else { Next::Option }
    }

    fn send_info(
        &mut self,
        option: u32,
        request: &InfoRequest<'_>,
        about: &ExportInfo,
        geometry: &Geometry,
        rules: &Rules,
    ) {
        let mut item = info::EXPORT.to_be_bytes().to_vec();
        item.extend_from_slice(&rules.len.to_be_bytes());
        item.extend_from_slice(&transmission_flags(rules).to_be_bytes());
        self.reply(option, rep::INFO, &item);
        for (kind, text) in
            [(info::NAME, request.name), (info::DESCRIPTION, shorten(&about.description))]
        {
            let wanted = request.items.contains(&kind);
            if wanted && (kind == info::NAME || !text.is_empty()) {
                let item = [&kind.to_be_bytes()[..], text.as_bytes()].concat();
                self.reply(option, rep::INFO, &item);
            }
        }
        if request.items.contains(&info::BLOCK_SIZE) {
            let mut item = info::BLOCK_SIZE.to_be_bytes().to_vec();
            let preferred = geometry.preferred_block.max(rules.min_block).max(512);
            let preferred = preferred.min(MAX_PAYLOAD).next_power_of_two();
            for size in [rules.min_block, preferred, MAX_PAYLOAD] {
                item.extend_from_slice(&size.to_be_bytes());
            }
            self.reply(option, rep::INFO, &item);
        }
    }
}

/// The protocol wants a power of two of at most 64 KiB.
fn min_block(geometry: &Geometry) -> u32 {
    geometry.min_block.clamp(1, 64 << 10).next_power_of_two()
}

fn transmission_flags(rules: &Rules) -> u16 {
    let mut flags = export::HAS_FLAGS
        | export::SEND_FLUSH
        | export::SEND_FUA
        | export::CAN_MULTI_CONN
        | export::SEND_CACHE;
    if rules.read_only {
        flags |= export::READ_ONLY;
    } else {
        flags |= export::SEND_TRIM | export::SEND_WRITE_ZEROES;
    }
    if rules.structured {
        flags |= export::SEND_DF;
    }
    if rules.fast_zero {
        flags |= export::SEND_FAST_ZERO;
    }
    flags
}
