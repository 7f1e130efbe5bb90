//! `dray pki`.

use crate::output::Output;
use clap::Subcommand;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_net::pki::{self, PkiError};
use dray_net::tls::{CLIENT_CERT, SERVER_CERT};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  On one machine, which keeps the authority's key:
    dray pki init --dir /root/dray-ca
    dray pki issue hosta --dir /root/dray-ca
    dray pki issue hostb --dir /root/dray-ca
  Then copy /root/dray-ca/hosta to hosta as its [tls] directory, and hostb likewise.

  When hostb is lost or taken over:
    dray pki revoke hostb --dir /root/dray-ca
  Then copy /root/dray-ca/ca-crl.pem into the [tls] directory of every other host.

  The files (ca-cert.pem, server-cert.pem, …) have the layout that QEMU and libvirt expect.";

/// The authority's directory unless another is named.
const DEFAULT_DIR: &str = "/etc/dray/ca";

/// Arguments of `dray pki`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Make a certificate authority
    Init {
        /// Directory for its certificate and key
        #[arg(long, default_value = DEFAULT_DIR)]
        dir: PathBuf,
    },
    /// Make a host's certificates, in a directory of its name
    Issue {
        /// The host's name: its agent's `name`, by which peers know it
        host: String,
        /// Directory of the certificate authority
        #[arg(long, default_value = DEFAULT_DIR)]
        dir: PathBuf,
        /// Further DNS name or IP address, for QEMU and libvirt clients (repeatable)
        #[arg(long = "address", value_name = "NAME")]
        addresses: Vec<String>,
    },
    /// Revoke a host's certificates: no other host lets it in any more
    Revoke {
        /// The host's name; its certificates lie in a directory of that name
        #[arg(required_unless_present = "certificates")]
        host: Option<String>,
        /// Directory of the certificate authority
        #[arg(long, default_value = DEFAULT_DIR)]
        dir: PathBuf,
        /// The file of a certificate to revoke, in place of a host's name (repeatable)
        #[arg(long = "cert", value_name = "FILE", conflicts_with = "host")]
        certificates: Vec<PathBuf>,
    },
}

/// Makes an authority, or the certificates of one host, or revokes some.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    match &args.what {
        Action::Init { dir } => {
            pki::create_ca(dir).map_err(failed("cannot make a certificate authority"))?;
            output.result(&json!({ "result": "made", "dir": dir }), |_, _| {
                let dir = dir.display();
                format!(
                    "made a certificate authority in {dir}; keep {dir}/{} secret\n",
                    pki::CA_KEY
                )
            });
        }
        Action::Issue { host, dir, addresses } => {
            let what = format!("cannot make certificates for '{host}'");
            let made = pki::issue(dir, host, addresses).map_err(failed(what))?;
            output.result(&json!({ "result": "made", "host": host, "dir": made }), |_, _| {
                format!("made {}; copy it to {host} as its [tls] directory\n", made.display())
            });
        }
        Action::Revoke { host, dir, certificates } => {
            let of_host = |host: &String| {
                [SERVER_CERT, CLIENT_CERT].map(|file| dir.join(host).join(file)).to_vec()
            };
            let files = host.as_ref().map_or_else(|| certificates.clone(), of_host);
            let (list, added) =
                pki::revoke(dir, &files).map_err(failed("cannot revoke certificates"))?;
            output.result(&json!({ "result": "revoked", "list": list, "new": added }), |_, _| {
                revoked(&list, added)
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn revoked(list: &Path, added: usize) -> String {
    let what = match added {
        0 => "they were revoked before".to_owned(),
        1 => "revoked 1 certificate".to_owned(),
        many => format!("revoked {many} certificates"),
    };
    let list = list.display();
    format!(
        "{what}; copy {list} into the [tls] directory of every host: its agent reads the list within 5 s, and ends the \
         connections of those who are on it\n"
    )
}

fn failed(what: impl Into<String>) -> impl FnOnce(PkiError) -> Refusal {
    move |error| Refusal {
        hint: error.hint.map(str::to_owned),
        ..Refusal::new(ErrorKind::Invalid, what, error.what)
    }
}
