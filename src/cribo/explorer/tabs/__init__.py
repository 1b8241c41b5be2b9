"""The tabs of the page, one module each: fields, buttons and events."""
