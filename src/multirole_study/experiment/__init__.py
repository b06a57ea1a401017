"""A cell of the matrix: its settings, how it is trained, recorded and evaluated."""

import warnings

# tqdm draws no bars here, and a notebook without ipywidgets is no fault of its user
warnings.filterwarnings("ignore", message="IProgress not found")
