await null; export const NAME = 'modern';
