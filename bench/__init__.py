"""Measures attention implementations side by side: `python -m bench --help`. Not part of the installed package."""
