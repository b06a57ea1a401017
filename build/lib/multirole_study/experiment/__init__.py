"""Train, record and evaluate one cell of the experiment matrix."""

import warnings

# tqdm draws no bars here, and a notebook without ipywidgets is no fault of its user
warnings.filterwarnings("ignore", message="IProgress not found")
