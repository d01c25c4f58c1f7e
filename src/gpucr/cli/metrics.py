"""`gpucr metrics`: metrics of jobs that are supervised or served on demand, for Prometheus."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import click

from gpucr.cli.options import complete_file, json_option
from gpucr.cli.output import print_json
from gpucr.on_demand.metrics import OnDemandCollector
from gpucr.quantities import whole_number
from gpucr.supervise import metrics, metrics_server


@click.command("metrics")
@click.option(
    "--listen", metavar="[HOST:]PORT", help="Serve them over HTTP until a signal comes. Default HOST: 127.0.0.1."
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    shell_complete=complete_file,
    help="Write them to FILE, for node_exporter.",
)
@click.option("--alerts", is_flag=True, help="Print alert rules for Prometheus instead.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana instead.")
@json_option
def command(*, listen: str | None, textfile: Path | None, alerts: bool, dashboard: bool, as_json: bool) -> None:
    """Print the metrics of jobs that are supervised or served on demand, in Prometheus's text format.

    Needs `gpucr[metrics]`.

    \b
    Example:
      gpucr metrics
      gpucr metrics --textfile /var/lib/prometheus/node-exporter/gpucr.prom
      gpucr metrics --listen 9470
      gpucr metrics --alerts > /etc/prometheus/gpucr.yml
    """
    if sum((listen is not None, textfile is not None, alerts, dashboard, as_json)) > 1:
        raise click.UsageError("give one of --listen, --textfile, --alerts, --dashboard and --json")
    if alerts or dashboard:
        click.echo(metrics.alerts() if alerts else metrics.dashboard(), nl=False)
    elif as_json:
        found = [
            {"metric": name, "labels": labels, "value": str(value)}
            for name, labels, value in metrics.samples((OnDemandCollector(),))
        ]
        print_json("metrics", {"metrics": found})
    elif textfile is not None:
        metrics.write_textfile(textfile, (OnDemandCollector(),))
    elif listen is not None:
        host, port = _address(listen)
        click.echo(f"http://{host}:{metrics_server.serve(host, port, (OnDemandCollector(),))}/metrics")
        sys.stdout.flush()
        threading.Event().wait()
    else:
        click.echo(metrics.as_text((OnDemandCollector(),)).decode(), nl=False)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    number = whole_number(port)
    if number is None or number > 65535:
        raise click.UsageError(f"{text!r} is not an address: write --listen 9470 or --listen 0.0.0.0:9470")
    return host.strip("[]") or "127.0.0.1", number
