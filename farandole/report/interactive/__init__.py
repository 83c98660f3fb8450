"""The part of a report that answers: charts to zoom, lanes to hide, timelines."""
