"""Train, record and evaluate one cell of the experiment matrix."""

import warnings

# tqdm draws no bars here, so a notebook does not need ipywidgets
warnings.filterwarnings("ignore", message="IProgress not found")
