"""The engine as the server sees it: one interface, in this process or in one of its own."""
