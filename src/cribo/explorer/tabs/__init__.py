"""The tabs of the page: fields, buttons and events, one file per tab."""
