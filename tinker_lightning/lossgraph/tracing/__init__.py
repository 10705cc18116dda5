"""From a Python function to a graph: it is run once on stand-ins that note what is done with them."""
