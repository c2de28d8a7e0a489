"""The page in headless Chromium."""

import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from matplotlib.image import imread

from commands import HANGS
from weightnorm.lab.reports.style import STYLES

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-features=NetworkTimeServiceQuerying",
    "--no-first-run",
    "--hide-scrollbars",
]
DARK = "--blink-settings=preferredColorScheme=0"
PHONE = """<!DOCTYPE html><title>?</title>
<iframe src="index.html" style="width: 375px; height: 800px; border: 0"></iframe>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const widths = [...page.querySelectorAll("figure svg")].map(x => x.getBoundingClientRect().width);
  const text = [...page.querySelectorAll("figure text")].map(x => x.getBoundingClientRect().height);
  document.title = [page.documentElement.scrollWidth, Math.min(...widths), Math.min(...text)];
};
</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture
def browse(tmp_path):
    def browse(*words):
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS)
        return done.stdout

    return browse


@pytest.fixture
def server(files):
    """The page over HTTP, at localhost and at any other name; requests are recorded."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.headers["Host"], self.path))
            pages = {"/index.html": files.page.read_bytes(), "/phone.html": PHONE.encode()}
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http.server_port, asked
        http.shutdown()
        thread.join()


def test_the_page_loads_nothing_else(browse, server, files):
    port, asked = server
    rules = f"--host-resolver-rules=MAP * 127.0.0.1:{port}"
    dom = browse(rules, "--dump-dom", f"http://report.test:{port}/index.html")
    assert asked == [(f"report.test:{port}", "/index.html")]
    assert dom.count("<figure>") == dom.count("</svg>") == len(files.figures) // 2
    assert dom.count('<th scope="row">weight norm</th>') >= 4
    assert dom.count("(published)") == 2 * 5  # two presets on CIFAR-10
    assert re.search(r"weight norm, lr 0\.003, seed 9: unfinished,\s+epoch 2 of 4", dom)


def pixels(path):
    return (imread(path)[..., :3] * 255).round().astype(int)


def test_the_figures_are_drawn_in_their_colors(browse, files, tmp_path):
    picture = tmp_path / "page.png"
    browse("--window-size=1280,1600", f"--screenshot={picture}", files.page.as_uri())
    page = pixels(picture)
    assert page.shape[:2] == (1600, 1280)
    assert page.mean() > 200
    for style in STYLES.values():
        color = [int(style.color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(page - color).max(-1) <= 2).sum() > 200, style


def test_page_follows_the_dark_color_scheme(browse, files, tmp_path):
    picture = tmp_path / "page.png"
    browse(DARK, "--window-size=1280,1600", f"--screenshot={picture}", files.page.as_uri())
    page = pixels(picture)
    assert page.mean() < 60
    assert (page.min(-1) == 255).sum() > 500  # the figures' ink, brighter than the page's


def test_page_fits_a_phone_without_horizontal_scrolling(browse, server):
    port, _ = server
    dom = browse("--dump-dom", f"http://127.0.0.1:{port}/phone.html")
    title = re.search("<title>(.*)</title>", dom)
    width, narrowest, smallest = map(float, title[1].split(","))
    assert width == 375
    assert narrowest > 300
    assert smallest > 8
