//! `dray pki`.

use crate::output::Output;
use clap::Subcommand;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_net::pki::{self, PkiError};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  On one machine, which keeps the authority's key:
    dray pki init --dir /root/dray-ca
    dray pki issue hosta --dir /root/dray-ca
    dray pki issue hostb --dir /root/dray-ca
  Then copy /root/dray-ca/hosta to hosta as its [tls] directory, and hostb likewise.
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
}

/// Makes an authority, or the certificates of one host.
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
    }
    Ok(ExitCode::SUCCESS)
}

fn failed(what: impl Into<String>) -> impl FnOnce(PkiError) -> Refusal {
    move |error| Refusal {
        hint: error.hint.map(str::to_owned),
        ..Refusal::new(ErrorKind::Invalid, what, error.what)
    }
}
