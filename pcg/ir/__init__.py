"""The intermediate representation: graphs, types, the operator table, text, and programs."""
