//! Carrying a negotiation over a connection: greeting, options, replies, the change to TLS.

use crate::dialogue::{Agreed, Dialogue, Next, Secrecy};
use crate::inbound::Inbound;
use crate::limits::{MAX_OPTION, MAX_OPTIONS, MAX_SKIPPED_OPTION, NEGOTIATION_TIME};
use crate::option::OptionHeader;
use crate::proto::{INIT_MAGIC, OPTION_MAGIC, handshake, opt};
use crate::tls::{GuestList, Leave, Tls, TlsChannel};
use dray_serve::{Access, Door};
use rustls::pki_types::CertificateDer;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Instant;

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Negotiates until the client may send requests; `None` when it leaves before that. `proved` is
/// called when it has shown a good certificate, with what that leaves to it if there is a list of guests. `enter` is
/// called before the client learns that it may, and may still turn it away with `None`. Once
/// `is_closing`, the client is not answered any more: whatever the answer, it would be of a server
/// that leaves, and clients take a refusal for the last word.
///
/// # Errors
/// The client broke the protocol, took too long, or the connection failed.
pub(crate) fn negotiate<T>(
    inbound: &mut Inbound,
    door: Door<'_>,
    (tls, guests): (&Tls, Option<&Arc<dyn GuestList>>),
    is_closing: impl Fn() -> bool,
    proved: impl Fn(Option<Leave>),
    enter: impl FnOnce(&Agreed) -> Option<T>,
) -> io::Result<Option<(Box<Agreed>, T)>> {
    let deadline = Instant::now() + NEGOTIATION_TIME;
    inbound.set_deadline(Some(deadline))?;
    let mut dialogue = Dialogue::new(door, secrecy_of(tls));
    greet(inbound, &mut dialogue)?;
    for _ in 0..MAX_OPTIONS {
        if !inbound.need(crate::option::HEADER_LEN)? || is_closing() {
            return Ok(None);
        }
        let next = one_option(inbound, &mut dialogue)?;
        if let Some(held) = dialogue.door.held_until() {
            // Time in which the client was held is not its own.
            inbound.set_deadline(Some(held + NEGOTIATION_TIME))?;
        }
        match next {
            Next::Cut => return Ok(None),
            _ if is_closing() => return Ok(None),
            Next::Close => {
                // A client that hangs up after ABORT may not wait for the answer.
                let _ = send(inbound, &mut dialogue.out);
                return Ok(None);
            }
            Next::Option => send(inbound, &mut dialogue.out)?,
            Next::StartTls => {
                send(inbound, &mut dialogue.out)?;
                let certificates = start_tls(inbound, tls, deadline)?;
                dialogue.tls_is_active();
                let leave = guests.map(|guests| leave_of(&**guests, &certificates));
                if !certificates.is_empty() {
                    proved(leave.clone());
                }
                if let Some(leave) = leave {
                    dialogue.door.limit(move |name| leave(name));
                }
            }
            Next::Transmit(agreed) => {
                let Some(entered) = enter(&agreed) else { return Ok(None) };
                send(inbound, &mut dialogue.out)?;
                inbound.set_deadline(None)?;
                return Ok(Some((agreed, entered)));
            }
        }
    }
    Err(invalid("too many options in one negotiation"))
}

fn secrecy_of(tls: &Tls) -> Secrecy {
    match tls {
        Tls::Off => Secrecy::Off,
        Tls::Optional(_) => Secrecy::Offered,
        Tls::Required(_) => Secrecy::Required,
    }
}

/// What the list of guests leaves to a client; nothing to one without a certificate.
fn leave_of(guests: &dyn GuestList, certificates: &[CertificateDer<'_>]) -> Leave {
    match certificates {
        [] => Arc::new(|_: &str| Access::Nothing),
        certificates => guests.leave(certificates),
    }
}

fn send(inbound: &Inbound, out: &mut Vec<u8>) -> io::Result<()> {
    let result = inbound.channel().send(&mut [IoSlice::new(out)]);
    out.clear();
    result
}

fn greet(inbound: &mut Inbound, dialogue: &mut Dialogue<'_>) -> io::Result<()> {
    let ours = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    dialogue.out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    dialogue.out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    dialogue.out.extend_from_slice(&ours.to_be_bytes());
    send(inbound, &mut dialogue.out)?;
    let theirs = u32::from_be_bytes(inbound.take()?);
    if theirs & !u32::from(ours) != 0 {
        return Err(invalid("unknown handshake flags"));
    }
    dialogue.no_zeroes = theirs & u32::from(handshake::NO_ZEROES) != 0;
    Ok(())
}

fn one_option(inbound: &mut Inbound, dialogue: &mut Dialogue<'_>) -> io::Result<Next> {
    let header = OptionHeader::parse(&inbound.take()?)
        .ok_or_else(|| invalid("wrong magic at the start of an option"))?;
    if header.len > MAX_OPTION {
        if header.len > MAX_SKIPPED_OPTION || header.option == opt::EXPORT_NAME {
            return Err(invalid("option is too long"));
        }
        inbound.skip(u64::from(header.len))?;
        dialogue.too_big(header.option);
        return Ok(Next::Option);
    }
    let mut payload = vec![0; header.len as usize];
    inbound.read_exact(&mut payload)?;
    Ok(dialogue.answer(header.option, &payload))
}

fn start_tls(
    inbound: &mut Inbound,
    tls: &Tls,
    deadline: Instant,
) -> io::Result<Vec<CertificateDer<'static>>> {
    if !inbound.buffered().is_empty() {
        // They came in the clear and may be anyone's.
        return Err(invalid("bytes between starttls and its answer"));
    }
    let (Tls::Optional(config) | Tls::Required(config)) = tls else {
        return Err(invalid("tls is not configured"));
    };
    let socket = inbound.channel().bare()?.ok_or_else(|| invalid("tls inside tls"))?;
    let (secure, certificates) = TlsChannel::accept(socket, Arc::clone(config), deadline)?;
    inbound.replace_channel(Arc::new(secure));
    Ok(certificates)
}
