"""What a plan costs in seconds and bytes, part by part, from profiles, links and peak rates."""
