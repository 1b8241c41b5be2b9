"""Applications, each in its own folder; they do not import each other."""
