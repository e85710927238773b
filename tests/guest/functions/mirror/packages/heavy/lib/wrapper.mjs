import heavy from './main.js';
export const NAME = heavy.NAME;
