"""Applications: each in its folder, built on features and jobs; they do not import each other."""
