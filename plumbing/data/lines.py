"""Files of text, read as lines of JSON: `datasets` would give each column one type for all rows, and
make dates of texts.
"""

import csv
import json
import os
import sys
from itertools import islice
from typing import Any, Iterable, TextIO

import datasets
import pyarrow
from datasets.packaged_modules.csv.csv import CsvConfig

from plumbing.data.rows import AT, LINE, VERSION
from utils import first_line


class Lines(datasets.ArrowBasedBuilder):
    """The rows of files of JSON (lines, or a list) or .csv files (all cells are text), of each AT,
    its place, and LINE. The files may be compressed.
    """

    BUILDER_CONFIG_CLASS = CsvConfig  # of which `sep` is read; "" for files of JSON
    VERSION = datasets.Version(f"{VERSION}.0.0")

    def _info(self):
        columns = dict.fromkeys((AT, LINE), datasets.Value("string"))
        return datasets.DatasetInfo(features=datasets.Features(columns))

    def _split_generators(self, dl_manager: Any):
        # The library names what it has unpacked by the path alone, which may hold another file now.
        config = dl_manager.download_config
        config.force_extract = config.delete_extracted = True
        files = self.config.data_files
        paths = dl_manager.download_and_extract(files)
        given = ({"names": files[split], "paths": paths[split]} for split in files)
        return list(map(datasets.SplitGenerator, files, given))

    def _generate_shards(self, names: list[str], paths: list[str]):
        yield from names

    def _generate_tables(self, names: list[str], paths: list[str]):
        files = [name for part in self.config.data_files.values() for name in part]
        folder = os.path.commonprefix(files).rpartition("/")[0]
        for shard, (name, path) in enumerate(zip(names, paths)):
            # A single file is named by its flag.
            place = f"{name[len(folder) + 1 :]} " if len(files) > 1 else ""
            try:
                with open(path, encoding="utf-8-sig", newline="") as file:
                    read = csv_lines(file, self.config.sep) if self.config.sep else lines(file)
                    rows = ((f"{place}row {i}", x) for i, x in enumerate(read, 1) if x.strip())
                    while batch := list(islice(rows, 10_000)):
                        table = pyarrow.table(dict(zip((AT, LINE), zip(*batch))))
                        yield datasets.builder.Key(shard, batch[0][0]), table
            except Exception as error:  # of a file of any content
                raise ValueError(f"{place}{first_line(error)}") from error


def lines(file: TextIO) -> Iterable[str]:
    """Return the lines of a file of JSON, or the items of the list that it holds, as JSON."""
    first = next(filter(str.strip, file), "")
    file.seek(0)
    return map(json.dumps, json.load(file)) if first.lstrip().startswith("[") else file


def csv_lines(file: TextIO, sep: str) -> Iterable[str]:
    """Yield the rows of a .csv file as JSON."""
    csv.field_size_limit(sys.maxsize)
    for i, row in enumerate(csv.DictReader(file, delimiter=sep, strict=True), 1):
        if None in row:
            raise ValueError(f"row {i} has more cells than the first line has names")
        yield json.dumps(row)
