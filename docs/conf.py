"""Configuration of Sphinx for the site: ``make docs``.

The source directory is the whole repository, so that a link between two pages is the same file here
and on a code host. What the build generates is in docs/generated and build/docs.
"""

import os
import sys
from pathlib import Path

import gradkit

HERE = Path(__file__).resolve().parent
EXTENSIONS = str(HERE / "_ext")
sys.path.insert(0, EXTENSIONS)
import figures  # noqa: E402

# The gallery runs in separate processes, which find the style of its figures there.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [EXTENSIONS, os.getenv("PYTHONPATH")]))

project = "gradkit"
author = copyright = "The gradkit developers"  # noqa: A001
version = release = gradkit.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "beyond_docs",
    "docstrings",
    "every_public_name",
    "figures_first",
    "gradkit_names",
    "mathml",
    "outside_names",
]

# --- pages -----------------------------------------------------------------------------------

root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "benchmarks/*.md",
    "kernels/README.md",
    "testbed/README.md",
    "testbed/*/README.md",
]
exclude_patterns = [
    ".*",
    "testbed/.*",
    "build",
    "dist",
    "benchmarks/results",
    "docs/gallery",
    "docs/_*",
]
templates_path = [str(HERE / "_templates")]  # autosummary searches from the source directory
nitpicky = True
nitpick_ignore_regex = [  # types in the docstrings' text, which have no page
    ("py:(class|obj|exc|func|meth|attr|data|mod)", r"(?!gradkit\b).*"),
]
suppress_warnings = ["config.cache"]  # the gallery's order is a function

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = ["math"]  # ```math, as code hosts write it
myst_heading_anchors = 4
html_math_renderer = "mathml"

# --- the reference ---------------------------------------------------------------------------

autosummary_imported_members = True
autodoc_typehints = "none"  # docstrings say more
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# --- other libraries' documentation --------------------------------------------------------------

intersphinx_mapping = {
    name: (where, str(HERE / f"inventories/{name}.inv"))
    for name, where in {
        "cupy": "https://docs.cupy.dev/en/stable",
        "jax": "https://docs.jax.dev/en/latest",
        "numpy": "https://numpy.org/doc/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
    }.items()
}

# --- the gallery -----------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "docs/gallery",
    "gallery_dirs": "docs/generated/gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "backreferences_dir": "docs/generated/backreferences",
    "doc_module": ("gradkit",),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "image_srcset": ["2x"],
    "thumbnail_size": (640, 400),
    "parallel": 2,
    "plot_gallery": True,
    "remove_config_comments": True,
    "capture_repr": (),
    "image_scrapers": (figures.scraper,),
    "reset_modules": ("matplotlib", "figures.dress"),
    "reset_argv": figures.arguments,
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
}

# --- HTML ------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "gradkit"
html_static_path = ["_static"]
html_css_files = ["gradkit.css"]
html_favicon = "_static/logo.svg"
html_additional_pages = {"index": "redirect.html"}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {
        "text": "gradkit",
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
    },
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# A section of one page needs no navigation within the section.
ALONE = """distributed examples faq functions guarantees guide index install migration numerics
performance tutorial"""
html_sidebars = {f"docs/{name}": [] for name in ALONE.split()} | {
    "docs/generated/gallery/*": [],
    "docs/records/*": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_copy_empty_lines = False  # where results were removed
