"""The paper's data, networks, training, tables, figures and page, made with ``ffcp``."""

__version__ = "0.3.0"
