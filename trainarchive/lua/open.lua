-- Make a lane known, or come back to it.
-- KEYS: meta frames offsets sources ctl claim
-- ARGV: candidate_epoch report state, then id and description of each source
-- Answer: epoch
local meta, frames, offsets, sources = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local known = redis.call('HMGET', meta, 'epoch', 'state')
local epoch, before = known[1], known[2]
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', tonumber(time[2]))

-- Committed but neither in the stream nor in the store: the stream's key was lost. Begin anew from what is sealed.
local lost = {}
if redis.call('EXISTS', frames) == 0 then
  local all = redis.call('HGETALL', offsets)
  local value = {}
  for i = 1, #all, 2 do value[all[i]] = all[i + 1] end
  for field, committed in pairs(value) do
    if string.sub(field, -2) ~= ':s' then
      local sealed = value[field .. ':s'] or '0'
      if tonumber(committed) > tonumber(sealed) then
        lost[#lost + 1] = field
        lost[#lost + 1] = sealed
      end
    end
  end
end

if not epoch or #lost > 0 then
  epoch = ARGV[1]
  redis.call('HSET', meta, 'epoch', epoch, 'opened', now, 'last_append', '0', 'last_commit', '0', 'pending', '0')
  for i = 1, #lost, 2 do redis.call('HSET', offsets, lost[i], lost[i + 1]) end
end
redis.call('HSET', meta, 'report', ARGV[2], 'state', ARGV[3])
-- Even where all that the lost stream held is known to be sealed: append takes "pending, but no stream" for lost.
if redis.call('EXISTS', frames) == 0 then redis.call('HSET', meta, 'pending', '0') end
for i = 4, #ARGV, 2 do redis.call('HSET', sources, ARGV[i], ARGV[i + 1]) end
if before == 'archived' then
  for _, key in ipairs(KEYS) do redis.call('PERSIST', key) end
end
return epoch
