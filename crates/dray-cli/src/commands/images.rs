//! `dray images`.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use crate::show::images::list;
use clap::Subcommand;
use dray_api::{ApiResult, ImageAdd, ImageRemove, Images};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray images                                       the same as `dray images list`
  dray images add vm1-root /srv/vm/vm1.qcow2 --format qcow2
  dray images remove vm1-root                       stop serving it; the file stays
  dray images remove vm1-root --delete              deletes a replica: a later move back
                                                    copies everything

QEMU opens an image by its name on the agent's NBD socket:
  -blockdev driver=nbd,node-name=root,server.type=unix,server.path=/run/dray/nbd.sock,export=NAME";

/// Arguments of `dray images`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Option<Action>,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// List the images of this host
    List,
    /// Serve a file or block device as an image
    Add(AddArgs),
    /// Stop serving an image; its file stays
    Remove {
        /// Name of the image
        name: String,
        /// Also delete the file; only for a replica
        #[arg(long)]
        delete: bool,
    },
}

#[derive(clap::Args, Debug)]
struct AddArgs {
    /// Name of the image: the name of its export
    name: String,
    /// The file or block device, inside one of the configured pools
    path: PathBuf,
    /// Format of the content; all but raw and luks are exported with room to grow
    #[arg(long, value_parser = ["raw", "qcow2", "luks", "vmdk", "vdi", "vhdx"])]
    format: Option<String>,
    /// Export it with room to grow, regardless of the format
    #[arg(long, conflicts_with = "fixed")]
    growable: bool,
    /// Export it at its present size, regardless of the format
    #[arg(long)]
    fixed: bool,
    /// Refuse writes, as for a backing image
    #[arg(long)]
    read_only: bool,
}

impl AddArgs {
    fn resolve(self) -> ApiResult<ImageAdd> {
        Ok(ImageAdd {
            name: self.name,
            path: absolute(&self.path)?,
            growable: (self.growable || self.fixed).then_some(self.growable),
            format: self.format,
            read_only: self.read_only,
        })
    }
}

/// Lists, adds or removes images.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    match args.what.unwrap_or(Action::List) {
        Action::List => {
            super::tell_troubles(client, output).await?;
            let images = client.call(Images {}).await?;
            output.result(&images, |images, style| list(images, style));
        }
        Action::Add(args) => {
            let image = client.call(args.resolve()?).await?;
            output.result(&image, |image, _| {
                format!("serving {} as image {}\n", image.path.display(), image.name)
            });
        }
        Action::Remove { name, delete } => {
            let command = ImageRemove { name, delete };
            let image = client.call(command).await?;
            output.result(&image, |image, _| {
                let (name, path) = (&image.name, image.path.display());
                // The agent does not delete a file that is not the replica's own, or a device.
                let stays = !delete || image.path.exists();
                let file = if stays { "stays" } else { "is deleted" };
                format!("removed image {name}; {path} {file}\n")
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}
