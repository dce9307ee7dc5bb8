"""From measurements on ranks to profiles."""
