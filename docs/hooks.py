"""Shows files of the whole repository on the site, and adapts the links between them."""

import importlib.metadata
import os
import pathlib
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "examples/README.md",
    "examples/ported/README.md",
    "slurm/README.md",
    "tests/conformance/README.md",
)
LINK = re.compile(r'(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!\w+:|#)[^)#\s"]+')
NAMES = re.compile(r"<td.*?</td>|<h[2-6] .*?</h[2-6]>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>|<span class=\"doc doc-object-name.*?</span>", re.DOTALL)
TEXT = re.compile(r"(?<=>)[^<]+")
ON_THE_SITE = re.compile(r"<!-- on the site: (.*?) -->", re.DOTALL)
LAYERS = "<!-- the layers of pyproject.toml -->"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the addresses of repository and site from `pyproject.toml`, if it has any."""
    pairs = importlib.metadata.metadata("hpcstrat").get_all("Project-URL") or []
    urls = dict(pair.split(", ", 1) for pair in pairs)
    config.repo_url = urls.get("Repository")
    config.site_url = urls.get("Documentation")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in `docs/`, and the files that any page links to."""
    pages = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    linked = {
        target for page in pages for target in targets(page) if not target.startswith("docs/")
    }
    for path in sorted({*PAGES, *linked}):
        if (ROOT / path).is_file():  # else mkdocs warns of the link
            files.append(File(path, os.fspath(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapts links to the site, which has no `docs/`, and shows what only it does."""
    place = page.file.src_uri
    path = os.path.relpath(page.file.abs_src_path or "", ROOT)

    def moved(link: re.Match[str]) -> str:
        return os.path.relpath(
            target(path, link[0]).removeprefix("docs/"), os.path.dirname(place) or "."
        )

    markdown = ON_THE_SITE.sub(r"\1", markdown).replace(LAYERS, layers())
    return LINK.sub(moved, markdown)


def layers() -> str:
    """The list of layers, as `pyproject.toml` has it."""
    (lines,) = re.findall(
        r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    rows = re.findall(r'"(.*)", # (.*)', lines)
    return "\n".join(["| layer | what it is for |", "|---|---|", *(row(*layer) for layer in rows)])


def row(folders: str, purpose: str) -> str:
    """A row of the table of layers."""
    return f"| {' '.join(f'`{folder}`' for folder in folders.split(' | '))} | {purpose} |"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets long names in contents, headings and tables break after a dot or an underscore."""
    breakable(page.toc.items)
    return NAMES.sub(lambda names: CODE.sub(with_breaks, names[0]), html)


def with_breaks(code: re.Match[str]) -> str:
    """The same HTML, in which text may break where names have a joint."""
    return TEXT.sub(
        lambda text: re.sub(r"(?<=\w)(\.(?!py\b)|_(?![A-Z])|=)(?=[^\W\d])", r"\1<wbr>", text[0]),
        code[0],
    )


def breakable(items: list[AnchorLink]) -> None:
    """Changes the titles of these and of those below them."""
    for item in items:
        item.title = item.title.replace("_", "_<wbr>")
        breakable(item.children)


def targets(path: str) -> Iterator[str]:
    """The files that a page links to, by their paths in the repository, as is its own."""
    for link in LINK.findall((ROOT / path).read_text()):
        yield target(path, link)


def target(path: str, link: str) -> str:
    """The path in the repository to which a page's link leads."""
    return os.path.normpath(os.path.join(os.path.dirname(path), link))
