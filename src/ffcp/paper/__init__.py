"""The paper's data, networks, training, tables and figures (needs the extra ``paper``)."""
