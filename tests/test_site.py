"""The documentation site builds without warnings, is complete, and fits wide and narrow screens."""

import json
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import weightnorm

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
NARROW, WIDE = 390, 1280

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
pytestmark = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, in another folder."""
    build = tmp_path_factory.mktemp("build")
    recipe = re.search(r"^docs:.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.M)
    words = recipe[1].replace("build/", f"{build}/").split()
    assert "-W" in words
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return build / "site"


def entries(site):
    """The names of objects.inv."""
    *_, compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(compressed).decode().splitlines()}


def test_every_public_name_has_an_entry(site):
    modules = (weightnorm, weightnorm.functional, weightnorm.diagnostics)
    found = entries(site)
    for name in {name for module in modules for name in module.__all__}:
        places = {f"{module.__name__}.{name}" for module in modules if name in module.__all__}
        assert places & found, name  # `Parts` is in two modules, and has one entry


@pytest.mark.parametrize("module", [weightnorm, weightnorm.functional, weightnorm.diagnostics])
def test_summary_table_has_every_public_name(site, module):
    page = (
        site / "docs" / "api" / f"{module.__name__.removeprefix('weightnorm.')}.html"
    ).read_text()
    table = page[page.index('<table class="autosummary') : page.index("</table>")]
    listed = set(re.findall(r'<span class="pre">(\w+)</span>', table))
    others = {
        "EPS",
        "Parts",
        "diagnostics",
        "functional",
    }  # not functions or classes; in `functional`
    assert set(module.__all__) - listed <= others


def test_every_document_is_a_page(site):
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/experiments/*.md")]
    assert len(documents) > 15
    for document in documents:
        assert (site / document.relative_to(ROOT).with_suffix(".html")).exists(), document
    assert (site / "index.html").read_text() == (site / "README.html").read_text()


class Page(HTMLParser):
    """The anchors of a page, and what it links to and shows."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.images = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found.get("id")}
        if tag == "img":
            self.images.add(found["src"])
        if tag in ("a", "link", "script", "img"):
            self.links |= {found.get("href"), found.get("src")} - {None}


def test_every_link_and_image_exists(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme in ("http", "https", "data", "mailto"):
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            assert file.exists(), f"{path.relative_to(site)}: {link}"
            # Sources link back to the right page, at times with the name of another module.
            if target.fragment and file in pages and "_modules" not in path.parts:
                assert unquote(target.fragment) in pages[file].anchors, f"{path}: {link}"
    assert len(pages[site / "index.html"].images) >= 6
    assert len(pages[site / "docs/experiments/claims.html"].images) >= 4


def test_names_in_inline_code_link_to_their_entries(site):
    links = Page((site / "index.html").read_text()).links
    assert "docs/api/weightnorm.html#weightnorm.remove_weight_norm" in links
    assert "docs/api/diagnostics.html#weightnorm.diagnostics.check" in links
    links = Page((site / "docs/migration.html").read_text()).links
    assert "api/weightnorm.html#weightnorm.parts" in links  # `parts(layer).g`


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_pages_fit_their_screens_and_search_finds_an_option(site, tmp_path):
    """No page scrolls sideways, all images are shown; in one run of the browser."""
    pages = sorted(str(path.relative_to(site)) for path in (site / "docs").rglob("*.html"))
    query = "search.html?q=normalize_update"
    frames = [(page, width) for page in ("index.html", *pages) for width in (NARROW, WIDE)]
    (site / "frames.html").write_text(f"""<!DOCTYPE html><title>?</title><script>
const open = (page, width) => new Promise(done => {{
  const frame = document.createElement("iframe");
  frame.style = `width: ${{width}}px; height: 800px; border: 0`;
  frame.onload = () => done([page, width, frame.contentDocument]);
  frame.src = page;
  document.documentElement.append(frame);
}});
const search = open({json.dumps(query)}, {WIDE});
Promise.all({json.dumps(frames)}.map(x => open(...x))).then(async all => {{
  const [,, results] = await search;
  // Results appear one after the other.
  const reference = () => results.querySelector('ul.search a[href*="api/weightnorm"]');
  for (let i = 0; i < 100 && !reference(); i++) await new Promise(f => setTimeout(f, 50));
  document.title = JSON.stringify({{
    widths: all.map(([page, width, d]) => [page, width, d.documentElement.scrollWidth]),
    images: all.flatMap(([page, , d]) =>
      [...d.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)),
    found: [...results.querySelectorAll("ul.search a")].map(a => a.getAttribute("href")),
  }});
}});
</script>""")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--disable-sync", "--disable-background-networking", "--no-first-run"]
    command += ["--disable-component-update", "--allow-file-access-from-files"]
    command += ["--virtual-time-budget=20000", f"--user-data-dir={tmp_path}", "--dump-dom"]
    command += [(site / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    title = re.search("<title>(.*?)</title>", done.stdout)[1]
    result = json.loads(title.replace("&amp;", "&"))
    assert len(result["widths"]) == len(frames)
    assert [row for row in result["widths"] if row[2] > row[1]] == []
    assert result["images"] == []
    assert any("api/weightnorm.html" in link for link in result["found"])
