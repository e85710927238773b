import unittest

from intervals import merge, total, without


class Merge(unittest.TestCase):
    def test_nothing(self):
        self.assertEqual(merge([]), [])

    def test_apart(self):
        self.assertEqual(merge([(1, 2), (5, 6)]), [(1, 2), (5, 6)])

    def test_overlap(self):
        self.assertEqual(merge([(1, 4), (3, 6)]), [(1, 6)])

    def test_contained(self):
        self.assertEqual(merge([(1, 9), (3, 4)]), [(1, 9)])

    def test_neighbours(self):
        self.assertEqual(merge([(1, 2), (3, 4)]), [(1, 4)])

    def test_unordered(self):
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])


class Total(unittest.TestCase):
    def test_one(self):
        self.assertEqual(total([(3, 3)]), 1)

    def test_twice(self):
        self.assertEqual(total([(1, 4), (3, 6)]), 6)


class Without(unittest.TestCase):
    def test_middle(self):
        self.assertEqual(without([(1, 9)], (4, 5)), [(1, 3), (6, 9)])

    def test_outside(self):
        self.assertEqual(without([(1, 3)], (5, 7)), [(1, 3)])


if __name__ == "__main__":
    unittest.main()
