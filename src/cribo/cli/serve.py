"""`cribo serve`: a segmentation memory over HTTP."""

from pathlib import Path

from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.base.errors import ConfigError
from cribo.cli.access import read_secret
from cribo.cli.command import Call, Command
from cribo.cli.running import BACKBONE_SHORT, SUGGESTION
from cribo.explorer.config import Limits
from cribo.explorer.serving.config import RequestLimits, ServeConfig

LABEL_STUDIO_KEY = "LABEL_STUDIO_API_KEY"
"""Environment variable with the access token of a user of Label Studio."""

TOKEN = "CRIBO_TOKEN"
"""Environment variable with the token of the server."""

HELP = """\
Serve a memory of `cribo segment` over HTTP, for other programs: POST an image and get its labels, their confidence, or
features. The backbone is loaded once; images that wait are labelled together. GET /openapi.json describes all requests.

  cribo segment FRAMES --backbone runs/mine --examples EXAMPLES --memory mine.safetensors
  cribo serve --memory mine.safetensors --backbone runs/mine
  cribo serve --memory mine.safetensors --backbone runs/mine --host 0.0.0.0 --token_file TOKEN

  curl -F image=@street.jpg http://127.0.0.1:7861/segment
  curl -F image=@street.jpg 'http://127.0.0.1:7861/segment?format=png' -o labels.png

With --label_studio, it is the ML backend of a Label Studio: its tasks get predictions, and the memory file grows with
each annotation that is submitted there. The file may be new.

  cribo serve --memory new.safetensors --backbone runs/mine --label_studio http://127.0.0.1:8080

The server is for this machine only (127.0.0.1). With --host 0.0.0.0, other machines can use it with a token, from a
file (--token_file) or the environment variable CRIBO_TOKEN, which they send as `Authorization: Bearer TOKEN`. When
another command adds examples to the memory, the server reads it again. Ctrl-C or SIGTERM stops it, after running
requests.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_class_arguments(ServeConfig)
    parser.add_argument("--host", type=str, default="127.0.0.1", help="0.0.0.0 allows other machines to use the server")
    parser.add_argument("--port", type=int, default=7861, help="port of the server; 0 takes a free one")
    parser.add_argument("--token_file", type=Path, help=f"file whose first line is the token; see also {TOKEN}")
    parser.add_argument(
        "--label_studio_key_file",
        type=Path,
        help=f"file whose first line is the access token of a user of Label Studio; see also {LABEL_STUDIO_KEY}",
    )
    parser.add_argument("--no_token", action="store_true", help="allow use by other machines without a token")
    parser.add_class_arguments(Limits)
    parser.add_class_arguments(RequestLimits)


def run(call: Call) -> None:
    """Run the command."""
    config, pictures, requests = call.build(ServeConfig), call.build(Limits), call.build(RequestLimits)
    options = call.options
    token = read_secret("token", TOKEN, options.token_file, none=options.no_token)
    key = None
    if config.label_studio is not None or options.label_studio_key_file is not None:
        key = read_secret("label_studio_key", LABEL_STUDIO_KEY, options.label_studio_key_file)
        if config.label_studio is None:
            raise ConfigError("--label_studio_key_file requires --label_studio, the address of Label Studio")
    with importing_networks(call.console):
        from cribo.explorer.serving.run import serve_memory

    serve_memory(
        config,
        host=options.host,
        port=options.port,
        pictures=pictures,
        requests=requests,
        console=call.console,
        token=token,
        open_to_all=options.no_token,
        label_studio_key=key,
    )


COMMAND = Command(
    help=HELP,
    usage="cribo serve --memory FILE --backbone SOURCE [options]",
    short=BACKBONE_SHORT,
    suggestions={"--backbone": SUGGESTION},
    less_memory="lower --batch_size or --max_megapixels",
    add_options=add_options,
    run=run,
)
