"""Hooks of mkdocs.yml: add pages from outside docs/ and the API's page, and rewrite links that point outside docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import multirole

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "METRICS.md": "metrics.md",
    "results/README.md": "committed.md",
    "studies/README.md": "studies.md",
    "examples/README.md": "examples.md",
    "docker/README.md": "containers.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
    "src/math_answers/README.md": "math_answers.md",
    "src/multirole_sandbox/README.md": "sandbox.md",
    "src/multirole_study/models/tiny-r/README.md": "tiny-r.md",
    "src/multirole_study/models/tiny-r-code/README.md": "tiny-r-code.md",
    "src/multirole_study/models/tiny-r-vain/README.md": "tiny-r-vain.md",
    "src/multirole_study/models/tiny-r-seed1/README.md": "tiny-r-seed1.md",
    "src/multirole_study/models/tiny-r-seed2/README.md": "tiny-r-seed2.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
WITHOUT_MEMBERS = ("MultiRoleGRPOConfig", "MultiRoleGRPOTrainer")
"""Their docstrings say what they add to TRL's."""


def static(config: MkDocsConfig, path: Path) -> File:
    """Return a file outside docs/ that the site copies unchanged to the same path below its root."""
    return File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, use_directory_urls=False)


def tables_outside_the_landing_page() -> list[Path]:
    """List the tables and captions of other studies than tiny-r's, which become pages that no menu lists."""
    return [
        path for path in sorted((ROOT / "results").glob("*/**/*.md")) if path.relative_to(ROOT).parts[1] != "tiny-r"
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, a page with the API, and the page of the results with all files that it links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    ordered = sorted(multirole.__dir__(), key=lambda name: not name.startswith("MultiRole"))
    names = [
        f"::: multirole.{name}" + "\n    options: {members: false}" * (name in WITHOUT_MEMBERS) for name in ordered
    ]
    files.append(File.generated(config, "api.md", content="\n\n".join(["# API", *names])))
    for path in tables_outside_the_landing_page():
        uri = path.relative_to(ROOT).as_posix()
        files.append(
            File.generated(config, uri, content=path.read_text(encoding="utf-8"), inclusion=InclusionLevel.NOT_IN_NAV)
        )
    landing = ROOT / "results" / "index.html"
    linked = re.findall(r'(?:href|src)="([^"#]+)"', landing.read_text(encoding="utf-8"))
    for path in {landing, *((landing.parent / link).resolve() for link in linked)}:
        files.append(static(config, path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to pages of the site or copies of other files; links to folders are removed. PluginError for a dead link."""
    uri = page.file.src_uri
    source = ROOT / SOURCES.get(uri, uri if uri.startswith("results/") else f"docs/{uri}")

    def mended(link: re.Match[str]) -> str:
        text, target, anchor = link[1], (source.parent / link[2]).resolve(), link[3] or ""
        if not target.exists():
            raise PluginError(f"{source.relative_to(ROOT)} links to {link[2]}, which does not exist.")
        name = target.relative_to(ROOT).as_posix()
        if target.is_dir():
            return text[1:-1]
        if name.startswith("results/tiny-r/") and target.suffix == ".md":  # a table or a caption of the landing page
            place = name.removeprefix("results/").removesuffix(".md").replace("/", "-")
            return f"{text}(results/index.html#{place})"
        if name not in PAGES and not name.startswith("docs/") and files.get_file_from_path(name) is None:
            if target.suffix == ".md":
                raise PluginError(
                    f"{source.relative_to(ROOT)} links to {name}, a page outside docs/ that the site does not have. Add it to `PAGES` of "
                    "tools/docs_site.py and to mkdocs.yml."
                )
            files.append(static(config, target))
        return f"{text}({PAGES.get(name, name.removeprefix('docs/'))}{anchor})"

    return LINK.sub(mended, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Link names in the style of TRL's docstrings, such as [`Workflow`]."""
    known = "|".join(multirole.__dir__())
    return re.sub(rf"\[<code>({known})</code>\]", r'<a href="api.html#multirole.\1"><code>\1</code></a>', html)
