"""Passes over graphs: fold, raise, attach, differentiate, fuse; and what a program keeps."""
