"""A page to look at what was learned: `cribo explore`; one file per tab, free of the page's library."""
